// The Python types that the hot paths create: ObjectRef, Pin, DraftHandle, Unguarded.
//
// They are plain CPython types, not nanobind classes: an instance costs one allocation, and one
// that outlives its store or the interpreter's module tear-down is legal. Each owns one RAII thing
// of store.h. Used by csrc/bindings*.cc only, with the GIL held.
#pragma once

#include <type_traits>

#include "bindings_common.h"

namespace shmrl::py {

class StoreCore;

struct RefObject {
  PyObject_HEAD;
  Ref ref;
  std::int64_t payload_bytes;  // -1: not known yet
  PyObject* weakrefs;
  Hold hold;  // empty: a plain name
};

struct PinObject {
  PyObject_HEAD;
  Pin pin;
};

struct DraftObject {
  PyObject_HEAD;
  PyObject* store;  // the StoreCore that made it
  Draft draft;
  Pin kept;        // after the seal, while the view lives
  PyObject* view;  // borrowed: what every Python view of the bytes is based on; null: there is none
  std::byte* data;
  Py_ssize_t size;
  std::int32_t parent;  // for the seal
  bool unattached;      // the ref is counted: no session keeps the object alive
  bool sealed;
  bool dropped;
};

extern PyTypeObject* g_ref_type;
extern PyTypeObject* g_pin_type;
extern PyTypeObject* g_draft_type;

void add_types(nb::module_& module);
void add_draft_types(nb::module_& module);

// A type that lives as long as the module does; one reference is kept for good.
inline PyTypeObject* add_type(nb::module_& module, const char* name, PyType_Spec& spec) {
  PyObject* type = checked(PyType_FromSpec(&spec));
  module.attr(name) = nb::handle(type);
  return reinterpret_cast<PyTypeObject*>(type);
}

template <class T>
T* allocate(PyTypeObject* type) {
  T* object = PyObject_New(T, type);
  if (object == nullptr) nb::raise_python_error();
  return object;
}

inline void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

// Runs a body that throws nb::python_error, as a C slot that returns null.
template <class Body>
auto guarded(Body&& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  if constexpr (std::is_pointer_v<decltype(body())>)
    return nullptr;
  else
    return -1;
}

inline bool is_ref(nb::handle object) noexcept { return Py_TYPE(object.ptr()) == g_ref_type; }

// BadRef unless it is an ObjectRef.
const Ref& parse_ref(nb::handle object);

// New references. `hold` may be empty.
PyObject* new_ref(const Ref& ref, Hold&& hold, std::int64_t payload_bytes = -1);
PyObject* new_pin(Pin&& pin);
PyObject* new_draft(nb::handle store, Draft&& draft, std::int32_t parent, bool unattached);

// Bytes of the value, without the header of the store; raises when the object has ended.
std::uint64_t value_bytes(shmrl::Store& store, const Ref& ref);

// Open stores of this process by arena id, so that a ref can answer `alive` and `nbytes`.
void register_store(std::uint64_t arena_id, StoreCore* store);
void unregister_store(std::uint64_t arena_id, StoreCore* store);
StoreCore* find_store(std::uint64_t arena_id);

}  // namespace shmrl::py
