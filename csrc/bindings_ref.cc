// ObjectRef, Pin and Unguarded, and refs inside messages: see bindings_ref.h.

#include "bindings_ref.h"

#include <structmember.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <new>
#include <unordered_map>

#include "bindings_store.h"
#include "bindings_values.h"

namespace shmrl::py {

PyTypeObject* g_ref_type = nullptr;
PyTypeObject* g_pin_type = nullptr;

namespace {

PyObject* g_restore_ref = nullptr;  // the function that unpickles a ref

// What this thread pickles or unpickles refs into; null outside collecting_refs / adopting_refs.
thread_local PyObject* t_collector = nullptr;
thread_local PyObject* t_adopter = nullptr;

std::unordered_multimap<std::uint64_t, StoreCore*>& stores() {
  static auto* map = new std::unordered_multimap<std::uint64_t, StoreCore*>;  // outlives finalizers
  return *map;
}

RefObject* as_ref(PyObject* self) { return reinterpret_cast<RefObject*>(self); }
PinObject* as_pin(PyObject* self) { return reinterpret_cast<PinObject*>(self); }

// -- ObjectRef -----------------------------------------------------------------

void ref_dealloc(PyObject* self) {
  if (as_ref(self)->weakrefs != nullptr) PyObject_ClearWeakRefs(self);
  as_ref(self)->hold.~Hold();
  destroy(self);
}

Py_hash_t ref_hash(PyObject* self) {
  const Ref& ref = as_ref(self)->ref;
  std::uint64_t mixed = ref.generation * 0x9E3779B97F4A7C15ull ^ ref.arena;
  mixed ^= mixed >> 29;
  const auto hash = static_cast<Py_hash_t>(mixed);
  return hash == -1 ? -2 : hash;
}

PyObject* ref_compare(PyObject* self, PyObject* other, int operation) {
  if (!is_ref(other)) Py_RETURN_NOTIMPLEMENTED;
  const auto order = as_ref(self)->ref <=> as_ref(other)->ref;
  Py_RETURN_RICHCOMPARE(order < 0 ? -1 : (order > 0 ? 1 : 0), 0, operation);
}

PyObject* ref_bytes(PyObject* self, PyObject*) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&as_ref(self)->ref), sizeof(Ref));
}

PyObject* ref_hex(PyObject* self, PyObject*) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::array<unsigned char, sizeof(Ref)> raw;
  std::memcpy(raw.data(), &as_ref(self)->ref, sizeof(Ref));
  std::array<char, 2 * sizeof(Ref)> text;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    text[2 * i] = kDigits[raw[i] >> 4];
    text[2 * i + 1] = kDigits[raw[i] & 15];
  }
  return PyUnicode_FromStringAndSize(text.data(), text.size());
}

PyObject* ref_repr(PyObject* self) {
  const Ref& ref = as_ref(self)->ref;
  std::array<char, 96> text;
  std::snprintf(text.data(), text.size(), "<ObjectRef %u.%llu of arena %016llx%s>", ref.index,
                static_cast<unsigned long long>(ref.generation),
                static_cast<unsigned long long>(ref.arena), as_ref(self)->hold ? ", counted" : "");
  return PyUnicode_FromString(text.data());
}

Ref decode_ref(const void* bytes, Py_ssize_t size) {
  Ref ref;
  if (size != sizeof(Ref))
    raise("BadRef",
          "a ref has " + std::to_string(sizeof(Ref)) + " bytes, not " + std::to_string(size));
  std::memcpy(&ref, bytes, sizeof(Ref));
  if (!well_formed(ref)) raise("BadRef", "these bytes are not a ref: forged or damaged");
  return ref;
}

PyObject* ref_from_bytes(PyObject*, PyObject* data) {
  return guarded([&]() -> PyObject* {
    if (!PyBytes_Check(data))
      raise("BadRef", std::string("expected the bytes of a ref, not ") + Py_TYPE(data)->tp_name);
    return new_ref(decode_ref(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)), Hold());
  });
}

PyObject* ref_from_hex(PyObject*, PyObject* text) {
  return guarded([&]() -> PyObject* {
    if (!PyUnicode_Check(text))
      raise("BadRef", std::string("expected the hex text of a ref, not ") + Py_TYPE(text)->tp_name);
    PyObject* data =
        PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyBytes_Type), "fromhex", "O", text);
    if (data == nullptr) {
      PyErr_Clear();
      raise("BadRef", "this text is not the hex form of a ref");
    }
    nb::object owned = nb::steal(data);
    return new_ref(decode_ref(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)), Hold());
  });
}

PyObject* ref_reduce(PyObject* self, PyObject*) {
  if (t_collector != nullptr && PyList_Append(t_collector, self) < 0) return nullptr;
  PyObject* bytes = ref_bytes(self, nullptr);
  return bytes == nullptr ? nullptr : Py_BuildValue("O(N)", g_restore_ref, bytes);
}

PyObject* ref_copy(PyObject* self, PyObject*) { return Py_NewRef(self); }

// The store that a ref can be asked through, and its Python object: kept, because a call may let go
// of the GIL.
struct Asked {
  explicit Asked(const Ref& ref) : core(find_store(ref.arena)), kept(keep(core)) {}

  StoreCore* core;
  nb::object kept;

 private:
  static nb::object keep(StoreCore* core) {
    if (core == nullptr)
      raise("StoreClosed", "no open store of this process is attached to the arena of this ref");
    return nb::find(*core);
  }
};

PyObject* ref_alive(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    const Ref& ref = as_ref(self)->ref;
    const Asked asked(ref);
    const Status status = StoreCore::Use(*asked.core)->probe(ref);
    if (status == Status::freed) Py_RETURN_FALSE;
    if (status != Status::not_sealed) require(status);
    Py_RETURN_TRUE;
  });
}

PyObject* ref_nbytes(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    RefObject* object = as_ref(self);
    if (object->payload_bytes < 0) {
      const Asked asked(object->ref);
      const StoreCore::Use store(*asked.core);
      object->payload_bytes = static_cast<std::int64_t>(value_bytes(*store, object->ref));
    }
    return PyLong_FromLongLong(object->payload_bytes);
  });
}

PyObject* ref_counted(PyObject* self, void*) {
  return PyBool_FromLong(static_cast<bool>(as_ref(self)->hold));
}

PyMethodDef ref_methods[] = {
    {"hex", ref_hex, METH_NOARGS, "The ref as 48 hex digits; `from_hex` reads them."},
    {"__bytes__", ref_bytes, METH_NOARGS, "The ref as 24 bytes; `from_bytes` reads them."},
    {"from_hex", ref_from_hex, METH_O | METH_STATIC, "A plain name from `hex()`; BadRef."},
    {"from_bytes", ref_from_bytes, METH_O | METH_STATIC, "A plain name from bytes(ref); BadRef."},
    {"__reduce__", ref_reduce, METH_NOARGS, nullptr},
    {"__copy__", ref_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", ref_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef ref_getters[] = {
    {"alive", ref_alive, nullptr,
     "Whether the object has not ended (it may be under construction).", nullptr},
    {"nbytes", ref_nbytes, nullptr, "Bytes of the value, without the header of the store.",
     nullptr},
    {"counted", ref_counted, nullptr, "Whether this reference keeps a never-attached object alive.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef ref_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(RefObject, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot ref_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(ref_dealloc)},
    {Py_tp_hash, reinterpret_cast<void*>(ref_hash)},
    {Py_tp_richcompare, reinterpret_cast<void*>(ref_compare)},
    {Py_tp_repr, reinterpret_cast<void*>(ref_repr)},
    {Py_tp_methods, ref_methods},
    {Py_tp_getset, ref_getters},
    {Py_tp_members, ref_members},
    {Py_tp_doc, const_cast<char*>("The name of an object, equal in all processes.")},
    {0, nullptr}};

PyType_Spec ref_spec = {
    "shmstore._core.ObjectRef", sizeof(RefObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, ref_slots};

// -- Pin -----------------------------------------------------------------------

void pin_dealloc(PyObject* self) {
  as_pin(self)->pin.~Pin();
  destroy(self);
}

int pin_buffer(PyObject* self, Py_buffer* view, int flags) {
  Pin& pin = as_pin(self)->pin;
  return PyBuffer_FillInfo(view, self, const_cast<std::byte*>(pin.data()),
                           static_cast<Py_ssize_t>(pin.size()), /*readonly=*/1, flags);
}

PyType_Slot pin_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(pin_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(pin_buffer)},
    {Py_tp_doc, const_cast<char*>("Keeps the bytes of one object in place; a read-only buffer.")},
    {0, nullptr}};

PyType_Spec pin_spec = {
    "shmstore._core.Pin", sizeof(PinObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, pin_slots};

// -- Unguarded -----------------------------------------------------------------

struct UnguardedObject {
  PyObject_HEAD;
  Py_buffer source;
};

UnguardedObject* as_unguarded(PyObject* self) { return reinterpret_cast<UnguardedObject*>(self); }

PyObject* unguarded_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* source = nullptr;
  if (kwargs != nullptr || !PyArg_ParseTuple(args, "O", &source)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "Unguarded takes one buffer");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr && PyObject_GetBuffer(source, &as_unguarded(self)->source, PyBUF_SIMPLE) < 0)
    Py_CLEAR(self);
  return self;
}

void unguarded_dealloc(PyObject* self) {
  PyBuffer_Release(&as_unguarded(self)->source);
  destroy(self);
}

int unguarded_buffer(PyObject* self, Py_buffer* view, int flags) {
  Py_buffer& source = as_unguarded(self)->source;
  return PyBuffer_FillInfo(view, self, source.buf, source.len, /*readonly=*/0, flags);
}

PyType_Slot unguarded_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(unguarded_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(unguarded_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(unguarded_buffer)},
    {Py_tp_doc, const_cast<char*>("Passes a read-only buffer as writable, for torch, which has no "
                                  "read-only tensors and would warn. Nobody may write to it.")},
    {0, nullptr}};

PyType_Spec unguarded_spec = {"shmstore._core.Unguarded", sizeof(UnguardedObject), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, unguarded_slots};

// -- refs inside messages ------------------------------------------------------

// Unpickles a ref. A plain C function, because pickle finds it by its module and name.
PyObject* restore_ref(PyObject*, PyObject* data) {
  return guarded([&]() -> PyObject* {
    if (!PyBytes_Check(data)) raise("BadRef", "a pickled ref holds bytes");
    const Ref ref = decode_ref(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data));
    Hold hold;
    if (t_adopter != nullptr) {
      const nb::object adopter = nb::borrow(t_adopter);
      const Status status = StoreCore::Use(*nb::inst_ptr<StoreCore>(adopter))->hold(ref, hold);
      if (status != Status::freed && status != Status::foreign_ref && status != Status::not_sealed)
        require(status);
    }
    return new_ref(ref, std::move(hold));
  });
}

PyMethodDef restore_definition = {"restore_ref", restore_ref, METH_O,
                                  "A ref from its bytes; counted inside adopting_refs."};

// Installs an object (None: nothing) in a thread's slot and returns what was there.
nb::object swap_slot(PyObject*& slot, nb::handle next) {
  PyObject* before = slot;
  slot = next.is_none() ? nullptr : Py_NewRef(next.ptr());
  return before == nullptr ? nb::none() : nb::steal(before);
}

nb::object swap_ref_collector(nb::handle next) {
  if (!next.is_none() && !PyList_Check(next.ptr())) raise("BadValue", "a collector is a list");
  return swap_slot(t_collector, next);
}

nb::object swap_ref_adopter(nb::handle next) {
  if (!next.is_none() && !nb::isinstance<StoreCore>(next))
    raise("BadValue", "refs are adopted by a store");
  return swap_slot(t_adopter, next);
}

}  // namespace

std::uint64_t value_bytes(shmrl::Store& store, const Ref& ref) {
  Pin pin;
  require(store.pin(ref, Wait{}, pin));
  ValueHeader header;
  return read_header(pin.data(), pin.size(), header) ? header.payload_bytes : pin.size();
}

void add_types(nb::module_& module) {
  g_ref_type = add_type(module, "ObjectRef", ref_spec);
  g_pin_type = add_type(module, "Pin", pin_spec);
  add_draft_types(module);
  add_type(module, "Unguarded", unguarded_spec);
  nb::object module_name = module.attr("__name__");
  g_restore_ref = checked(PyCFunction_NewEx(&restore_definition, nullptr, module_name.ptr()));
  module.attr("restore_ref") = nb::handle(g_restore_ref);  // one reference is kept for good
  module.def("swap_ref_collector", &swap_ref_collector, nb::arg("collector").none());
  module.def("swap_ref_adopter", &swap_ref_adopter, nb::arg("store").none());
}

const Ref& parse_ref(nb::handle object) {
  if (!is_ref(object)) [[unlikely]]
    raise("BadRef", std::string("expected an ObjectRef, not ") + Py_TYPE(object.ptr())->tp_name +
                        "; ObjectRef.from_bytes and from_hex make one");
  return as_ref(object.ptr())->ref;
}

PyObject* new_ref(const Ref& ref, Hold&& hold, std::int64_t payload_bytes) {
  auto* object = allocate<RefObject>(g_ref_type);
  object->ref = ref;
  object->payload_bytes = payload_bytes;
  object->weakrefs = nullptr;
  new (&object->hold) Hold(std::move(hold));
  return reinterpret_cast<PyObject*>(object);
}

PyObject* new_pin(Pin&& pin) {
  auto* object = allocate<PinObject>(g_pin_type);
  new (&object->pin) Pin(std::move(pin));
  return reinterpret_cast<PyObject*>(object);
}

void register_store(std::uint64_t arena_id, StoreCore* store) { stores().emplace(arena_id, store); }

void unregister_store(std::uint64_t arena_id, StoreCore* store) {
  auto [begin, end] = stores().equal_range(arena_id);
  for (auto at = begin; at != end; ++at)
    if (at->second == store) {
      stores().erase(at);
      return;
    }
}

StoreCore* find_store(std::uint64_t arena_id) {
  auto [begin, end] = stores().equal_range(arena_id);
  for (auto at = begin; at != end; ++at)
    if (at->second->is_open()) return at->second;
  return nullptr;
}

}  // namespace shmrl::py
