// Segments of the trainer into the arena: a frame of bytes that Python has made for all segments of
// one layout, with the segment's own arrays between.
//
// `SegmentWriter` owns the frames. `frame_of(segment)` makes one: (text_class, head, before_rows,
// before_digits, to_body, tail), where `head` begins with the store's header, see
// `trainer/segment_codec.py`; or it gives the bytes of the whole object, header and all, for a
// segment that fits no frame. Promises: what is read of a segment is checked first, so that no
// object makes us read beside it.

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

#include "bindings_put.h"
#include "bindings_values.h"
#include "segment_format.h"

namespace shmrl::py {
namespace {

constexpr std::size_t kColumns = 4;
constexpr std::size_t kDigits = 10;  // in which the size of the text stands
constexpr std::array<char, sizeof(std::int32_t)> kPad{};

constexpr std::array<int, kColumns> kColumnTypes = {NPY_INT32, NPY_INT32, NPY_FLOAT32, NPY_INT32};

struct Frame {
  std::size_t text_class = 0;
  std::string head, before_rows, before_digits, to_body, tail;
};

// What the frame of a segment depends on: tokens, the power of two that holds its text, rows of
// routing, layers, top_k, bytes of an expert's number, known rows, rows for tokens before it.
using FrameKey = std::array<std::uint64_t, 8>;

struct FrameKeyHash {
  std::size_t operator()(const FrameKey& key) const noexcept {
    std::uint64_t mixed = 0;
    for (const std::uint64_t part : key) mixed = (mixed ^ part) * 0x9E3779B97F4A7C15ull;
    return mixed ^ (mixed >> 29);
  }
};

// The names of a segment's fields, made once and kept for good.
struct Names {
  static PyObject* of(const char* text) { return checked(PyUnicode_InternFromString(text)); }
  std::array<PyObject*, kColumns> columns = {of("token_ids"), of("labels"), of("logprobs"),
                                             of("model_steps")};
  PyObject* text = of("text");
  PyObject* routed_experts = of("routed_experts");
  PyObject* routed_before = of("routed_before");
  PyObject* n_routed = of("n_routed");
};

const Names& names() {
  static const Names all;
  return all;
}

nb::object attribute(nb::handle object, PyObject* name) {
  return nb::steal(checked(PyObject_GetAttr(object.ptr(), name)));
}

// The bytes of an array, which `kept` keeps in place.
struct Numbers {
  nb::object kept;
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, 3> shape{};
  std::uint64_t itemsize = 0;
};

// False unless it is an array of numpy's own of these dimensions and of one of these types, without
// gaps. It may lie at any address: views of a message do.
bool take(nb::object array, int dimensions, int type, int other_type, Numbers& out) {
  auto* given = reinterpret_cast<PyArrayObject*>(array.ptr());
  if (Py_TYPE(array.ptr()) != &PyArray_Type || PyArray_NDIM(given) != dimensions ||
      (PyArray_TYPE(given) != type && PyArray_TYPE(given) != other_type) ||
      !PyArray_IS_C_CONTIGUOUS(given) || !PyArray_ISNOTSWAPPED(given))
    return false;
  out.data = static_cast<const std::byte*>(PyArray_DATA(given));
  out.bytes = static_cast<std::uint64_t>(PyArray_NBYTES(given));
  for (int i = 0; i < dimensions; ++i)
    out.shape[static_cast<std::size_t>(i)] = static_cast<std::uint64_t>(PyArray_DIM(given, i));
  out.itemsize = static_cast<std::uint64_t>(PyArray_ITEMSIZE(given));
  out.kept = std::move(array);
  return true;
}

// The parts of a segment that is as `trainer.segment.Segment` says, without any conversion.
struct Plain {
  nb::object text_kept;
  std::string_view text;
  std::array<Numbers, kColumns> columns;
  Numbers routed, before;
  std::uint64_t n_routed = 0;

  std::uint64_t n() const { return columns[0].shape[0]; }

  // False when it is not.
  bool read(nb::handle segment) {
    for (std::size_t c = 0; c < kColumns; ++c)
      if (!take(attribute(segment, names().columns[c]), 1, kColumnTypes[c], kColumnTypes[c],
                columns[c]) ||
          columns[c].shape[0] != n())
        return false;
    return read_text(segment) && read_routing(segment);
  }

 private:
  bool read_text(nb::handle segment) {
    text_kept = attribute(segment, names().text);
    if (!PyUnicode_Check(text_kept.ptr())) return false;
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text_kept.ptr(), &size);
    if (data == nullptr) {
      PyErr_Clear();
      return false;
    }
    text = {data, static_cast<std::size_t>(size)};
    return text.size() <= kMetadataBytesMax;
  }

  // `n_routed` below 0: all rows that are there.
  bool read_routing(nb::handle segment) {
    const nb::object known = attribute(segment, names().n_routed);
    if (!PyLong_CheckExact(known.ptr())) return false;
    const Py_ssize_t stated = PyLong_AsSsize_t(known.ptr());
    if (stated == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    nb::object given = attribute(segment, names().routed_experts);
    nb::object given_before = attribute(segment, names().routed_before);
    if (given.is_none()) return stated <= 0 && given_before.is_none();
    if (!take(std::move(given), 3, NPY_UINT8, NPY_UINT16, routed)) return false;
    const std::uint64_t rows = routed.shape[0];
    n_routed = stated < 0 ? rows : static_cast<std::uint64_t>(stated);
    if (rows > n() || rows + 1 < n() || n_routed > rows || !few_experts()) return false;
    if (given_before.is_none()) return true;
    return take(std::move(given_before), 3, NPY_UINT8, NPY_UINT16, before) &&
           before.itemsize == routed.itemsize && before.shape[1] == routed.shape[1] &&
           before.shape[2] == routed.shape[2] && before.shape[0] <= kRowsBeforeMax &&
           before.bytes <= kMetadataBytesMax;
  }

  // Of an array without rows any two extents are possible, and their product may overflow.
  bool few_experts() const {
    const std::uint64_t layers = routed.shape[1], top_k = routed.shape[2];
    return layers > 0 && top_k > 0 && layers <= kExpertsPerTokenMax / top_k;
  }
};

// One segment as it is to be written: the frame and the parts between, or all bytes at once.
struct Written : Plain {
  std::shared_ptr<const Frame> frame;
  nb::object whole;

  std::size_t pad_bytes() const { return n() % 2 * kPad.size(); }

  std::uint64_t size() const {
    if (whole.is_valid()) return static_cast<std::uint64_t>(PyBytes_GET_SIZE(whole.ptr()));
    const Frame& f = *frame;
    return f.head.size() + f.text_class + f.before_rows.size() + before.bytes +
           f.before_digits.size() + kDigits + f.to_body.size() +
           kColumns * (columns[0].bytes + pad_bytes()) + routed.bytes + f.tail.size() + kDigits;
  }

  // The header with which the object begins; BadValue when Python made another.
  ValueHeader header() const {
    const std::string_view head =
        whole.is_valid() ? std::string_view(PyBytes_AS_STRING(whole.ptr()), size()) : frame->head;
    ValueHeader found;
    if (!read_head(reinterpret_cast<const std::byte*>(head.data()), head.size(), found) ||
        found.header_bytes + found.payload_bytes != size())
      raise("BadValue", "a segment and its frame do not fit together");
    return found;
  }

  void write(std::byte* to) const {
    const auto put = [&to](const void* data, std::size_t bytes) {
      if (bytes > 0) copy_payload(to, data, bytes);
      to += bytes;
    };
    const auto put_text = [&put](std::string_view piece) { put(piece.data(), piece.size()); };
    if (whole.is_valid()) return put(PyBytes_AS_STRING(whole.ptr()), size());
    std::array<char, kDigits + 1> digits;
    std::snprintf(digits.data(), digits.size(), "%010llu",
                  static_cast<unsigned long long>(text.size()));
    put_text(frame->head);
    put_text(text);
    const std::size_t zeros = frame->text_class - text.size();
    std::memset(to, 0, zeros);
    to += zeros;
    put_text(frame->before_rows);
    put(before.data, before.bytes);
    put_text(frame->before_digits);
    put(digits.data(), kDigits);
    put_text(frame->to_body);
    for (const Numbers& column : columns) {
      put(column.data, column.bytes);
      put(kPad.data(), pad_bytes());
    }
    put(routed.data, routed.bytes);
    put_text(frame->tail);
    put(digits.data(), kDigits);
  }
};

class SegmentWriter {
 public:
  SegmentWriter(nb::object frame_of, std::size_t frames_max)
      : frame_of_(std::move(frame_of)), frames_max_(frames_max) {}

  std::uint32_t append(StoreCore& core, nb::handle session, nb::handle segment, nb::handle parent,
                       nb::handle timeout) {
    if (session.is_none()) raise("BadName", "a session id is a str, not None");
    const Target target = parse_target(core, session, timeout, parent);
    Draft draft = written(target, prepare(segment));
    return seal_in_session(target, draft);
  }

  nb::object put(StoreCore& core, nb::handle segment, nb::handle session, nb::handle timeout,
                 nb::handle parent) {
    const Target target = parse_target(core, session, timeout, parent);
    const Written prepared = prepare(segment);
    Draft draft = written(target, prepared);
    return seal(target, draft, prepared.header().payload_bytes);
  }

  nb::object bytes(nb::handle segment) {
    const Written prepared = prepare(segment);
    (void)prepared.header();
    nb::object all = nb::steal(
        checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(prepared.size()))));
    prepared.write(reinterpret_cast<std::byte*>(PyBytes_AS_STRING(all.ptr())));
    return all;
  }

  // `frame_of` may lead back to its writer: Python's collector is told, or both were left for ever.
  static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<SegmentWriter>(self)->frame_of_.ptr());
    return 0;
  }
  static int clear(PyObject* self) noexcept {
    nb::inst_ptr<SegmentWriter>(self)->frame_of_ = nb::none();
    return 0;
  }

 private:
  static Draft written(const Target& target, const Written& prepared) {
    const ValueHeader header = prepared.header();
    Draft draft = reserve(target, header.header_bytes, header.payload_bytes);
    prepared.write(draft.data());
    return draft;
  }

  Written prepare(nb::handle segment) {
    Written w;
    if (!w.read(segment)) raise("BadValue", "this is no segment that was checked");
    const FrameKey key = {w.n(),
                          std::bit_ceil(std::max<std::uint64_t>(w.text.size(), 1)),
                          w.routed.shape[0],
                          w.routed.shape[1],
                          w.routed.shape[2],
                          w.routed.itemsize,
                          w.n_routed,
                          w.before.shape[0]};
    const auto found = frames_.find(key);
    if (found != frames_.end()) {
      w.frame = found->second;
      return w;
    }
    const nb::object made = frame_of_(segment);
    if (PyBytes_Check(made.ptr()))
      w.whole = made;
    else
      keep(key, w, made);
    return w;
  }

  void keep(const FrameKey& key, Written& w, nb::handle made) {
    if (!PyTuple_Check(made.ptr()) || PyTuple_GET_SIZE(made.ptr()) != 6)
      raise("BadValue", "a frame is a tuple of six, or all bytes of the object");
    const auto part = [&](Py_ssize_t i) {
      char* data = nullptr;
      Py_ssize_t size = 0;
      if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(made.ptr(), i), &data, &size) < 0)
        nb::raise_python_error();
      return std::string(data, static_cast<std::size_t>(size));
    };
    auto frame = std::make_shared<Frame>();
    frame->text_class = nb::cast<std::size_t>(nb::handle(PyTuple_GET_ITEM(made.ptr(), 0)));
    const std::uint64_t longest = key[1];  // text of a segment that will find this frame
    if (frame->text_class < longest)
      raise("BadValue", "a segment and its frame do not fit together");
    frame->head = part(1);
    frame->before_rows = part(2);
    frame->before_digits = part(3);
    frame->to_body = part(4);
    frame->tail = part(5);
    w.frame = frame;
    (void)w.header();
    if (frames_.size() >= frames_max_) frames_.clear();
    frames_[key] = std::move(frame);
  }

  nb::object frame_of_;
  const std::size_t frames_max_;
  std::unordered_map<FrameKey, std::shared_ptr<const Frame>, FrameKeyHash> frames_;
};

// Rows of routing that are known; None when the segment is not plain as it stands.
nb::object known_rows(nb::handle segment) {
  Plain plain;
  if (!plain.read(segment)) return nb::none();
  return nb::int_(plain.n_routed);
}

// Raises for the first session that is gone; those before it have the object then.
nb::list attach_to_all(StoreCore& core, nb::handle sessions, nb::handle ref, nb::handle parent) {
  const nb::object all = nb::steal(checked(PySequence_Tuple(sessions.ptr())));
  const StoreCore::Use store(core);
  nb::list positions;
  for (nb::handle session : nb::borrow<nb::tuple>(all)) {
    const Target target = parse_target(core, session, nb::none(), parent);
    std::uint32_t position = 0;
    require(store->attach_object(target.session, parse_ref(ref), target.parent, position));
    positions.append(position);
  }
  return positions;
}

void* import_numpy() {
  import_array();
  return &g_hooks;
}

}  // namespace

void bind_segment_writer(nb::class_<StoreCore>& type, nb::module_& module) {
  if (import_numpy() == nullptr) nb::raise_python_error();
  using nb::arg;
  const auto none = [](const char* name) { return arg(name) = nb::none(); };
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&SegmentWriter::traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(&SegmentWriter::clear)},
                                {0, nullptr}};
  nb::class_<SegmentWriter>(module, "SegmentWriter", nb::type_slots(slots))
      .def(nb::init<nb::object, std::size_t>(), arg("frame_of"), arg("frames_max"))
      .def("append", &SegmentWriter::append, arg("store"), arg("session").none(), arg("segment"),
           none("parent"), none("timeout"))
      .def("put", &SegmentWriter::put, arg("store"), arg("segment"), none("session"),
           none("timeout"), none("parent"))
      .def("bytes", &SegmentWriter::bytes, arg("segment"));
  module.def("known_rows", &known_rows, arg("segment"));
  module.attr("EXPERTS_PER_TOKEN_MAX") = kExpertsPerTokenMax;
  module.attr("ROWS_BEFORE_MAX") = kRowsBeforeMax;
  module.attr("METADATA_BYTES_MAX") = kMetadataBytesMax;
  type.def("session_attach_to_all", &attach_to_all, arg("sessions"), arg("ref").none(),
           arg("parent").none());
}

}  // namespace shmrl::py
