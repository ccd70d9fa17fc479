// DraftHandle and DraftView: an object under construction, and its writable bytes.
#include <new>

#include "bindings_ref.h"
#include "bindings_store.h"
#include "bindings_values.h"

namespace shmrl::py {

PyTypeObject* g_draft_type = nullptr;

namespace {

DraftObject* as_draft(PyObject* self) { return reinterpret_cast<DraftObject*>(self); }

// -- DraftHandle ---------------------------------------------------------------

// All Python views of a draft's bytes are based on one DraftView object (numpy keeps the exporter,
// not the buffer, so counting buffers would miss it). While it lives the bytes must stay in place,
// sealed, discarded or not: somebody could still write through it.
struct DraftView {
  PyObject_HEAD;
  DraftObject* draft;  // owned
};

DraftView* as_view(PyObject* self) { return reinterpret_cast<DraftView*>(self); }
PyTypeObject* g_view_type = nullptr;

void view_dealloc(PyObject* self) {
  DraftObject* draft = as_view(self)->draft;
  draft->view = nullptr;
  Pin(std::move(draft->kept)).reset();  // out of the object first: it may wait without the GIL
  Py_DECREF(draft);
  destroy(self);
}

int view_buffer(PyObject* self, Py_buffer* view, int flags) {
  DraftObject* draft = as_view(self)->draft;
  const bool readonly = draft->sealed || draft->dropped;
  return PyBuffer_FillInfo(view, self, draft->data, draft->size, readonly ? 1 : 0, flags);
}

PyType_Slot view_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(view_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(view_buffer)},
    {Py_tp_doc, const_cast<char*>("The writable bytes of an object under construction.")},
    {0, nullptr}};

PyType_Spec view_spec = {
    "shmstore._core.DraftView", sizeof(DraftView), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, view_slots};

void draft_dealloc(PyObject* self) {
  DraftObject* object = as_draft(self);
  object->draft.~Draft();
  object->kept.~Pin();
  Py_XDECREF(object->store);
  destroy(self);
}

StoreCore& store_of_draft(DraftObject* object) {
  return *nb::inst_ptr<StoreCore>(nb::handle(object->store));
}

void require_open_draft(DraftObject* object) {
  if (object->sealed || object->dropped)
    raise("BadValue", object->sealed ? "the draft is sealed already" : "the draft was discarded");
  if (!object->draft) raise("BadValue", "another thread seals this draft");
}

// The draft is taken out of the object while the core works on it: the call may wait without the
// GIL, and another thread that seals or discards the same draft meanwhile is told that it is taken.
PyObject* draft_seal(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    DraftObject* object = as_draft(self);
    require_open_draft(object);
    ValueHeader header;
    const bool parsed = read_header(object->data, static_cast<std::uint64_t>(object->size), header);
    const StoreCore::Use store(store_of_draft(object));
    Draft draft = std::move(object->draft);
    const Ref ref = draft.ref();
    Hold hold;
    Pin kept;
    const Status status = store->seal(draft, object->unattached ? &hold : nullptr, object->parent,
                                      object->view != nullptr ? &kept : nullptr);
    if (status == Status::freed)
      object->dropped = true;
    else
      object->draft = std::move(draft);  // what is left of it
    if (object->view != nullptr) object->kept = std::move(kept);
    require(status);
    object->sealed = true;
    return new_ref(ref, std::move(hold),
                   parsed ? static_cast<std::int64_t>(header.payload_bytes) : object->size);
  });
}

PyObject* draft_discard(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    DraftObject* object = as_draft(self);
    if (object->sealed || object->dropped) Py_RETURN_NONE;
    require_open_draft(object);  // not while another thread seals it: the seal may succeed
    const StoreCore::Use store(store_of_draft(object));
    object->dropped = true;
    if (object->view == nullptr) {
      Draft draft = std::move(object->draft);
      require(store->discard(draft));
    } else {
      // Writable views of the bytes exist: end the object, but let the bytes stay until they go.
      const Ref ref = object->draft.ref();
      std::uint64_t ended = 0;
      require(store->free({&ref, 1}, false, ended));
    }
    Py_RETURN_NONE;
  });
}

PyObject* draft_ref(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    DraftObject* object = as_draft(self);
    require_open_draft(object);
    return new_ref(object->draft.ref(), Hold());
  });
}

PyObject* draft_view(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    DraftObject* object = as_draft(self);
    require_open_draft(object);
    if (object->view != nullptr) return Py_NewRef(object->view);
    auto* view = allocate<DraftView>(g_view_type);
    view->draft = reinterpret_cast<DraftObject*>(Py_NewRef(self));
    object->view = reinterpret_cast<PyObject*>(view);
    return object->view;
  });
}

PyMethodDef draft_methods[] = {
    {"view", draft_view, METH_NOARGS, "The writable bytes, as a buffer."},
    {"seal", draft_seal, METH_NOARGS, "Publish the bytes; returns the ref."},
    {"discard", draft_discard, METH_NOARGS, "End the object unsealed; no error when it is over."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef draft_getters[] = {
    {"ref", draft_ref, nullptr, "The ref before the seal, a plain name: a get on it waits.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot draft_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(draft_dealloc)},
    {Py_tp_methods, draft_methods},
    {Py_tp_getset, draft_getters},
    {Py_tp_doc, const_cast<char*>("An object under construction: view, then seal or discard.")},
    {0, nullptr}};

PyType_Spec draft_spec = {
    "shmstore._core.DraftHandle", sizeof(DraftObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, draft_slots};

}  // namespace

void add_draft_types(nb::module_& module) {
  g_draft_type = add_type(module, "DraftHandle", draft_spec);
  g_view_type = add_type(module, "DraftView", view_spec);
}

PyObject* new_draft(nb::handle store, Draft&& draft, std::int32_t parent, bool unattached) {
  auto* object = allocate<DraftObject>(g_draft_type);
  new (&object->draft) Draft(std::move(draft));
  new (&object->kept) Pin();
  object->store = Py_NewRef(store.ptr());
  object->data = object->draft.data();
  object->size = static_cast<Py_ssize_t>(object->draft.size());
  object->view = nullptr;
  object->parent = parent;
  object->unattached = unattached;
  object->sealed = object->dropped = false;
  return reinterpret_cast<PyObject*>(object);
}

}  // namespace shmrl::py
