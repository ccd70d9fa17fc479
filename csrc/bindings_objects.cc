// put, get, free, build: the paths that must cost about a microsecond from Python.
//
// Owns nothing. Plain numpy arrays and bytes are written and read here; for every other value the
// Python codec plans the bytes (hooks.encode) or reads them (hooks.decode). Promises: a value is
// either sealed whole or its draft is discarded; nothing is published half-written.

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "bindings_put.h"
#include "bindings_values.h"

namespace shmrl::py {
namespace {

// Codes of headers.NUMPY_CODES: index by code gives the numpy type, and back.
constexpr std::array<int, 15> kTypeOfCode = {
    -1,        NPY_BOOL,   NPY_INT8, NPY_UINT8, NPY_INT16,  NPY_UINT16, NPY_INT32,  NPY_UINT32,
    NPY_INT64, NPY_UINT64, NPY_HALF, NPY_FLOAT, NPY_DOUBLE, NPY_CFLOAT, NPY_CDOUBLE};
constexpr std::array<std::uint8_t, 15> kSizeOfCode = {0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 8, 16};

constexpr std::array<std::uint8_t, NPY_NTYPES_LEGACY> make_code_of_type() {
  std::array<std::uint8_t, NPY_NTYPES_LEGACY> codes{};
  for (std::size_t code = 1; code < kTypeOfCode.size(); ++code)
    codes[static_cast<std::size_t>(kTypeOfCode[code])] = static_cast<std::uint8_t>(code);
  static_assert(sizeof(long) == 8 && sizeof(long long) == 8);
  codes[NPY_LONG] = codes[NPY_LONGLONG] = codes[NPY_INT64];
  codes[NPY_ULONG] = codes[NPY_ULONGLONG] = codes[NPY_UINT64];
  return codes;
}
constexpr auto kCodeOfType = make_code_of_type();

nb::object put_flat(const Target& target, const ValueHeader& header, const void* payload) {
  Draft draft = reserve(target, sizeof(header), header.payload_bytes);
  std::memcpy(draft.data(), &header, sizeof(header));
  if (header.payload_bytes > 0)
    copy_payload(draft.data() + sizeof(header), payload, header.payload_bytes);
  return seal(target, draft, header.payload_bytes);
}

// A header for arrays that this file writes itself; kind stays `bytes` for those it does not.
ValueHeader plain_array_header(PyArrayObject* array) {
  ValueHeader header;
  PyArray_Descr* descr = PyArray_DESCR(array);
  const int type = PyArray_TYPE(array);
  const int ndim = PyArray_NDIM(array);
  if (type < 0 || type >= NPY_NTYPES_LEGACY || kCodeOfType[static_cast<std::size_t>(type)] == 0 ||
      !PyArray_IS_C_CONTIGUOUS(array) || ndim > static_cast<int>(kInlineDims) ||
      !PyDataType_ISNOTSWAPPED(descr) || PyDataType_METADATA(descr) != nullptr)
    return header;
  header.kind = Kind::array;
  header.dtype_code = kCodeOfType[static_cast<std::size_t>(type)];
  header.ndim = static_cast<std::uint8_t>(ndim);
  for (int i = 0; i < ndim; ++i)
    header.shape[static_cast<std::size_t>(i)] = static_cast<std::uint64_t>(PyArray_DIM(array, i));
  header.payload_bytes = static_cast<std::uint64_t>(PyArray_NBYTES(array));
  return header;
}

nb::object put_encoded(const Target& target, nb::handle value) {
  nb::object encoded = nb::steal(
      checked(PyObject_CallFunction(g_hooks.encode, "OOO", nb::find(target.core).ptr(), value.ptr(),
                                    target.core.allow_pickle ? Py_True : Py_False)));
  nb::object head = encoded[0];
  const auto head_bytes = static_cast<std::size_t>(PyBytes_GET_SIZE(head.ptr()));
  const auto payload_bytes = nb::cast<std::uint64_t>(nb::object(encoded[1]));
  Draft draft = reserve(target, head_bytes, payload_bytes);
  std::memcpy(draft.data(), PyBytes_AS_STRING(head.ptr()), head_bytes);
  // The writer gets the payload as a memoryview that is dead when it returns: it cannot be kept.
  nb::object view = nb::steal(
      checked(PyMemoryView_FromMemory(reinterpret_cast<char*>(draft.data() + head_bytes),
                                      static_cast<Py_ssize_t>(payload_bytes), PyBUF_WRITE)));
  nb::object write = encoded[2];
  write(view);
  return seal(target, draft, payload_bytes);
}

nb::object put(StoreCore& core, nb::handle value, nb::handle session, nb::handle timeout,
               nb::handle parent) {
  const Target target = parse_target(core, session, timeout, parent);
  PyTypeObject* type = Py_TYPE(value.ptr());
  if (type == &PyArray_Type) {
    auto* array = reinterpret_cast<PyArrayObject*>(value.ptr());
    const ValueHeader header = plain_array_header(array);
    if (header.kind == Kind::array) return put_flat(target, header, PyArray_DATA(array));
  } else if (type == &PyBytes_Type) {
    ValueHeader header;
    header.payload_bytes = static_cast<std::uint64_t>(PyBytes_GET_SIZE(value.ptr()));
    return put_flat(target, header, PyBytes_AS_STRING(value.ptr()));
  }
  return put_encoded(target, value);
}

// The bytes of one buffer of a caller, kept in place while this lives. Plain arrays, bytes and text
// (as UTF-8) are read where they lie: numpy takes 0.1 µs to answer a request for a buffer.
class SourceBuffer {
 public:
  explicit SourceBuffer(nb::handle source) {
    PyObject* object = source.ptr();
    if (PyBytes_CheckExact(object)) {
      keep(object, PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object));
    } else if (is_plain_contiguous(object)) {
      auto* array = reinterpret_cast<PyArrayObject*>(object);
      keep(object, PyArray_DATA(array), PyArray_NBYTES(array));
    } else if (PyUnicode_CheckExact(object)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(object, &size);
      if (text == nullptr) nb::raise_python_error();
      keep(object, text, size);
    } else {
      view_ = std::make_unique<Py_buffer>();
      if (PyObject_GetBuffer(object, view_.get(), PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        raise("NotStorable",
              std::string("expected contiguous bytes, not ") + Py_TYPE(object)->tp_name);
      }
      data_ = view_->buf;
      size_ = static_cast<std::size_t>(view_->len);
    }
  }
  SourceBuffer(SourceBuffer&& other) noexcept
      : data_(other.data_),
        size_(other.size_),
        kept_(std::exchange(other.kept_, nullptr)),
        view_(std::move(other.view_)) {}
  SourceBuffer(const SourceBuffer&) = delete;
  SourceBuffer& operator=(const SourceBuffer&) = delete;
  SourceBuffer& operator=(SourceBuffer&&) = delete;
  ~SourceBuffer() {
    if (view_) PyBuffer_Release(view_.get());
    Py_XDECREF(kept_);
  }
  const void* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  static bool is_plain_contiguous(PyObject* object) {
    if (Py_TYPE(object) != &PyArray_Type) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    const int type = PyArray_TYPE(array);
    return type >= 0 && type < NPY_NTYPES_LEGACY &&
           kCodeOfType[static_cast<std::size_t>(type)] != 0 && PyArray_IS_C_CONTIGUOUS(array);
  }
  void keep(PyObject* object, const void* data, Py_ssize_t size) {
    kept_ = Py_NewRef(object);
    data_ = data;
    size_ = static_cast<std::size_t>(size);
  }

  const void* data_ = nullptr;
  std::size_t size_ = 0;
  PyObject* kept_ = nullptr;         // owned
  std::unique_ptr<Py_buffer> view_;  // of what had to be requested; released before it goes
};

// A draft with a header and buffers behind each other. The caller's header leaves the length open.
Draft gather(const Target& target, nb::handle head, nb::handle parts, std::size_t& payload_bytes) {
  // A tuple of our own: to ask a part for its buffer may run Python, which may change a list.
  const nb::object items = nb::steal(PySequence_Tuple(parts.ptr()));
  if (!items.is_valid()) {
    PyErr_Clear();
    raise("BadValue", std::string("the parts must be a sequence of buffers, not ") +
                          Py_TYPE(parts.ptr())->tp_name);
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
  std::vector<SourceBuffer> sources;
  sources.reserve(static_cast<std::size_t>(count));
  payload_bytes = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    sources.emplace_back(PyTuple_GET_ITEM(items.ptr(), i));
    payload_bytes += sources.back().size();
  }
  const SourceBuffer header(head);
  ValueHeader first;
  if (!read_head(static_cast<const std::byte*>(header.data()), header.size(), first) ||
      first.header_bytes != header.size())
    raise("BadValue", "the head is no value header; see shmstore.headers");
  Draft draft = reserve(target, header.size(), payload_bytes);
  std::byte* at = draft.data();
  std::memcpy(at, header.data(), header.size());
  const std::uint64_t stated_bytes = payload_bytes;
  std::memcpy(at + offsetof(ValueHeader, payload_bytes), &stated_bytes, sizeof(stated_bytes));
  at += header.size();
  for (const SourceBuffer& source : sources) {
    if (source.size() > 0) copy_payload(at, source.data(), source.size());
    at += source.size();
  }
  return draft;
}

nb::object put_parts(StoreCore& core, nb::handle head, nb::handle parts, nb::handle session,
                     nb::handle timeout, nb::handle parent) {
  const Target target = parse_target(core, session, timeout, parent);
  std::size_t payload_bytes = 0;
  Draft draft = gather(target, head, parts, payload_bytes);
  return seal(target, draft, payload_bytes);
}

std::uint64_t parse_bytes(nb::handle bytes, const char* what) {
  const bool whole = PyLong_Check(bytes.ptr()) && !PyBool_Check(bytes.ptr());
  const std::uint64_t count = whole ? PyLong_AsUnsignedLongLong(bytes.ptr()) : 0;
  if (!whole || PyErr_Occurred()) {
    PyErr_Clear();
    raise("BadValue",
          std::string(what) + " must be a count of bytes, an int from 0 up to 2**64 - 1");
  }
  return count;
}

nb::object reserve_draft(nb::handle self, nb::handle size, nb::handle session, nb::handle timeout,
                         nb::handle parent, nb::handle head) {
  const std::uint64_t payload_bytes = parse_bytes(size, "size");
  const std::uint64_t head_bytes = parse_bytes(head, "head");
  const Target target = parse_target(nb::cast<StoreCore&>(self), session, timeout, parent);
  Draft draft = reserve(target, head_bytes, payload_bytes);
  return nb::steal(new_draft(self, std::move(draft), target.parent, target.session.empty()));
}

// -- get -----------------------------------------------------------------------

Pin take_pin(StoreCore& core, nb::handle ref_object, nb::handle timeout) {
  const Ref& ref = parse_ref(ref_object);
  const Wait wait = parse_timeout(timeout);
  const StoreCore::Use store(core);
  Pin pin;
  Status status = store->pin(ref, Wait{}, pin);
  if (status == Status::not_sealed && wait.timeout_ns != 0) {
    const WithoutGil released;
    status = store->pin(ref, wait, pin);
  }
  require(status);
  return pin;
}

// Whether shape and item size cover exactly the payload, without overflow on scribbled shapes.
bool covers_payload(const ValueHeader& header) {
  std::uint64_t bytes = kSizeOfCode[header.dtype_code];
  bool empty = false;
  for (std::size_t i = 0; i < header.ndim; ++i) {
    if (header.shape[i] > static_cast<std::uint64_t>(std::numeric_limits<npy_intp>::max()))
      return false;
    if (header.shape[i] == 0)
      empty = true;
    else if (__builtin_mul_overflow(bytes, header.shape[i], &bytes))
      return false;
  }
  return header.payload_bytes == (empty ? 0 : bytes);
}

bool is_plain_array(const ValueHeader& header) {
  return header.kind == Kind::array && header.dtype_code > 0 &&
         header.dtype_code < kTypeOfCode.size() && header.ndim <= kInlineDims &&
         (header.flags & kFortran) == 0;
}

nb::object array_over(Pin&& pin, const ValueHeader& header) {
  if (!covers_payload(header)) raise("ArenaDamaged", "the object's shape is not its payload's");
  std::array<npy_intp, kInlineDims> shape;
  for (std::size_t i = 0; i < kInlineDims; ++i) shape[i] = static_cast<npy_intp>(header.shape[i]);
  auto* data = const_cast<std::byte*>(pin.data()) + header.header_bytes;
  PyArray_Descr* descr = PyArray_DescrFromType(kTypeOfCode[header.dtype_code]);
  nb::object array = nb::steal(
      checked(PyArray_NewFromDescr(&PyArray_Type, descr, header.ndim, shape.data(), nullptr, data,
                                   NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, nullptr)));
  PyObject* base = new_pin(std::move(pin));
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), base) < 0)
    nb::raise_python_error();
  return array;
}

nb::object bytes_of(const std::byte* data, std::size_t size) {
  nb::object bytes =
      nb::steal(checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size))));
  copy_payload(PyBytes_AS_STRING(bytes.ptr()), data, size);
  return bytes;
}

// A private copy of the whole object, as an array of bytes that its views keep alive.
nb::object private_copy(const Pin& pin) {
  npy_intp size = static_cast<npy_intp>(pin.size());
  nb::object copy = nb::steal(checked(PyArray_SimpleNew(1, &size, NPY_UINT8)));
  copy_payload(PyArray_DATA(reinterpret_cast<PyArrayObject*>(copy.ptr())), pin.data(), pin.size());
  return copy;
}

nb::object get(nb::handle self, nb::handle ref, nb::handle timeout, nb::handle copy_flag,
               nb::handle device) {
  const bool copy = parse_flag(copy_flag, "copy");
  auto& core = nb::cast<StoreCore&>(self);
  Pin pin = take_pin(core, ref, timeout);
  ValueHeader header;
  if (!read_header(pin.data(), pin.size(), header))
    raise("ArenaDamaged", "the object does not begin with a value header");
  if (device.is_none()) {
    if (is_plain_array(header)) {
      nb::object array = array_over(std::move(pin), header);
      if (!copy) return array;
      return nb::steal(
          checked(PyArray_NewCopy(reinterpret_cast<PyArrayObject*>(array.ptr()), NPY_KEEPORDER)));
    }
    if (header.kind == Kind::bytes)
      return bytes_of(pin.data() + header.header_bytes, header.payload_bytes);
  }
  nb::object base = copy ? private_copy(pin) : nb::steal(new_pin(std::move(pin)));
  nb::object whole = nb::steal(checked(PyMemoryView_FromObject(base.ptr())));
  if (!device.is_none())
    return nb::steal(checked(PyObject_CallFunctionObjArgs(g_hooks.to_device, self.ptr(),
                                                          whole.ptr(), device.ptr(), nullptr)));
  return nb::steal(checked(PyObject_CallFunctionObjArgs(
      g_hooks.decode, whole.ptr(), core.allow_pickle ? Py_True : Py_False, nullptr)));
}

nb::object pin_object(StoreCore& core, nb::handle ref, nb::handle timeout) {
  return nb::steal(new_pin(take_pin(core, ref, timeout)));
}

nb::object hold(StoreCore& core, nb::handle ref_object) {
  const Ref& ref = parse_ref(ref_object);
  Hold hold;
  require(StoreCore::Use(core)->hold(ref, hold));
  return nb::steal(new_ref(ref, std::move(hold)));
}

std::uint64_t free_refs(StoreCore& core, nb::handle refs, nb::handle strict_flag) {
  const bool strict = parse_flag(strict_flag, "strict");
  std::uint64_t ended = 0;
  if (is_ref(refs)) {
    require(StoreCore::Use(core)->free({&parse_ref(refs), 1}, strict, ended));
    return ended;
  }
  std::vector<Ref> all;
  // An iterator may own the only counted reference to what it yields: dropped here, the object
  // would end before this call ends it, and the count would be wrong.
  std::vector<nb::object> kept;
  nb::object iterator = nb::steal(PyObject_GetIter(refs.ptr()));
  if (!iterator.is_valid()) {
    PyErr_Clear();
    raise("BadRef",
          std::string("expected an ObjectRef or several, not ") + Py_TYPE(refs.ptr())->tp_name);
  }
  while (PyObject* item = PyIter_Next(iterator.ptr())) {
    kept.push_back(nb::steal(item));
    all.push_back(parse_ref(kept.back()));
  }
  if (PyErr_Occurred()) nb::raise_python_error();
  require(StoreCore::Use(core)->free(all, strict, ended));
  return ended;
}

void copy_into(nb::handle destination, nb::handle source) {
  Py_buffer target{};
  if (PyObject_GetBuffer(destination.ptr(), &target, PyBUF_WRITABLE) < 0) nb::raise_python_error();
  struct Guard {
    Py_buffer& view;
    ~Guard() { PyBuffer_Release(&view); }
  } guard{target};
  const SourceBuffer from(source);
  if (static_cast<std::size_t>(target.len) != from.size())
    raise("BadValue", "copy_into needs two buffers of one length, not " +
                          std::to_string(target.len) + " and " + std::to_string(from.size()));
  if (from.size() > 0) copy_payload(target.buf, from.data(), from.size());
}

void* import_numpy() {
  import_array();
  return &g_hooks;
}

}  // namespace

Target parse_target(StoreCore& core, nb::handle session, nb::handle timeout, nb::handle parent) {
  Target target{core, {}, parse_timeout(timeout), -1};
  if (!session.is_none()) {
    target.session = parse_text(session, "a session id");
    if (target.session.empty()) raise("BadName", "a session id has 1 to 63 bytes, not none");
  }
  if (!parent.is_none()) {
    const bool whole = PyIndex_Check(parent.ptr()) && !PyBool_Check(parent.ptr());
    const Py_ssize_t position = whole ? PyNumber_AsSsize_t(parent.ptr(), nullptr) : -1;
    if (position < 0 || position > std::numeric_limits<std::int32_t>::max()) {
      PyErr_Clear();
      raise("BadValue", std::string("parent is a position in the session, an int counted from 0, "
                                    "not this ") +
                            Py_TYPE(parent.ptr())->tp_name);
    }
    if (target.session.empty()) raise("BadValue", "parent is given, but no session");
    target.parent = static_cast<std::int32_t>(position);
  }
  return target;
}

Draft reserve(const Target& target, std::uint64_t head, std::uint64_t payload_bytes) {
  const StoreCore::Use store(target.core);
  Draft draft;
  std::uint64_t size = 0;
  if (__builtin_add_overflow(head, payload_bytes, &size)) size = UINT64_MAX;
  auto attempt = [&](const Wait& wait) {
    return target.session.empty() ? store->reserve(size, wait, draft, head)
                                  : store->reserve(size, target.session, wait, draft, head);
  };
  Status status = attempt(Wait{});
  if ((status == Status::full || status == Status::objects_full) && target.wait.timeout_ns != 0) {
    const WithoutGil released;
    status = attempt(target.wait);
  }
  if (status == Status::full) raise_full(*store, status, size);
  if (status == Status::too_large) raise_full(*store, status, payload_bytes);
  require(status);
  return draft;
}

std::uint32_t seal_in_session(const Target& target, Draft& draft) {
  std::uint32_t position = 0;
  require(StoreCore::Use(target.core)->seal(draft, nullptr, target.parent, nullptr, &position));
  return position;
}

nb::object seal(const Target& target, Draft& draft, std::size_t payload_bytes) {
  const Ref ref = draft.ref();
  Hold hold;
  require(StoreCore::Use(target.core)
              ->seal(draft, target.session.empty() ? &hold : nullptr, target.parent));
  return nb::steal(new_ref(ref, std::move(hold), static_cast<std::int64_t>(payload_bytes)));
}

void copy_payload(void* destination, const void* source, std::size_t size) {
  if (size < kCopyWithoutGilMin) {
    std::memcpy(destination, source, size);
  } else {
    const WithoutGil released;
    copy_in(destination, source, size);
  }
}

void bind_objects(nb::class_<StoreCore>& type) {
  if (import_numpy() == nullptr) nb::raise_python_error();
  using nb::arg;
  const auto none = [](const char* name) { return arg(name) = nb::none(); };
  type.def("put", &put, arg("value").none(), none("session"), none("timeout"), nb::kw_only(),
           none("parent"),
           nb::sig("def put(self, value: object, session: str | None = None, "
                   "timeout: float | None = None, *, parent: int | None = None) -> ObjectRef"),
           "Write a value into the arena; with `session`, attach it in the same atomic step.\n\n"
           "Waits up to `timeout` seconds for room (None: not at all), then StoreFull. The ref is "
           "counted unless a session holds the object.")
      .def("get", &get, arg("ref").none(), none("timeout"), arg("copy").none() = false,
           none("device"),
           nb::sig("def get(self, ref: ObjectRef, timeout: float | None = None, "
                   "copy: bool = False, device: typing.Any = None) -> typing.Any"),
           "The value, zero-copy and read-only; its view pins the bytes until it is collected.\n\n"
           "Waits up to `timeout` seconds for the seal (None: not at all), then ObjectNotSealed. "
           "ObjectFreed when it has ended. copy=True: private and writable. device: an array or "
           "tensor as a torch tensor there.")
      .def("free", &free_refs, arg("refs").none(), arg("strict").none() = false,
           nb::sig("def free(self, refs: ObjectRef | collections.abc.Iterable[ObjectRef], "
                   "strict: bool = False) -> int"),
           "End objects; returns how many this call ended. What a session holds is skipped; "
           "strict: NotOwner, and nothing is freed.\n\n"
           "One step for all processes. A kill inside it may split it after each `sessions_max` "
           "objects: those before have ended, those behind have not.")
      .def("hold", &hold, arg("ref").none(), nb::sig("def hold(self, ref: ObjectRef) -> ObjectRef"),
           "A counted reference to the object; ObjectFreed when it has ended.")
      .def("pin", &pin_object, arg("ref").none(), none("timeout"),
           "The object's bytes, header and all, as a read-only buffer that keeps them in place.")
      .def("put_parts", &put_parts, arg("head").none(), arg("parts").none(), none("session"),
           none("timeout"), none("parent"),
           "Gather a header and buffers into one object; see put_stream.")
      .def("reserve", &reserve_draft, arg("size").none(), none("session"), none("timeout"),
           none("parent"), arg("head").none() = 0,
           "An object of `head` bytes of header and `size` bytes under construction; see build.");
}

void bind_copy(nb::module_& module) {
  module.def("copy_into", &copy_into, nb::arg("destination"), nb::arg("source"));
}

}  // namespace shmrl::py
