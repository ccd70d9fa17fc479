// What the binding files share: see bindings_common.h.
#include "bindings_common.h"

#include <cxxabi.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cmath>

#include "bindings_store.h"

namespace shmrl::py {

namespace {

const char* error_class_of(Status status) {
  switch (status) {
    case Status::not_found:
      return "StoreNotFound";
    case Status::exists:
      return "StoreExists";
    case Status::bad_name:
      return "BadName";
    case Status::bad_option:
      return "BadValue";
    case Status::layout_mismatch:
      return "LayoutMismatch";
    case Status::foreign_user:
      return "StoreDenied";
    case Status::corrupt:
      return "ArenaDamaged";
    case Status::superseded:
      return "StoreSuperseded";
    case Status::clients_full:
      return "TableFull";
    case Status::no_memory:
      return "OutOfMemory";
    case Status::system_error:
      return "SystemRefused";
    case Status::closed:
      return "StoreClosed";
    case Status::forked:
      return "ForkedStore";
    case Status::stuck:
      return "StoreStuck";
    case Status::full:
      return "StoreFull";
    case Status::too_large:
      return "ObjectTooLarge";
    case Status::objects_full:
      return "TableFull";
    case Status::freed:
      return "ObjectFreed";
    case Status::not_sealed:
      return "ObjectNotSealed";
    case Status::bad_ref:
      return "BadRef";
    case Status::foreign_ref:
      return "BadRef";
    case Status::bad_draft:
      return "BadValue";
    case Status::bad_id:
      return "BadName";
    case Status::session_exists:
      return "SessionExists";
    case Status::session_released:
      return "SessionReleased";
    case Status::not_owner:
      return "NotOwner";
    case Status::bad_position:
      return "BadValue";
    case Status::sessions_full:
      return "TableFull";
    case Status::owners_full:
      return "TableFull";
    case Status::attachments_full:
      return "TableFull";
    case Status::ok:
    case Status::interrupted:
      break;
  }
  return "StoreError";
}

// Set by the atexit hook; from then on only the thread that runs it may take the GIL. seq_cst with
// g_callbacks: either a callback sees the flag, or the hook sees the callback and lets it finish.
std::atomic<bool> g_exiting{false};
std::atomic<int> g_callbacks{0};
thread_local int t_callbacks = 0;  // this thread's share of g_callbacks
pthread_t g_exiting_thread;

bool interpreter_goes_without_us() noexcept {
  return g_exiting.load(std::memory_order_seq_cst) &&
         !pthread_equal(g_exiting_thread, pthread_self());
}

[[noreturn]] void park() noexcept {
  for (;;) ::pause();
}

// The core's wait hooks: a thread that has the GIL lets go of it while it waits for a lock of the
// arena. Not while the interpreter ends: nobody else may take the GIL then.
void* leave_python() noexcept {
  return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void enter_python(void* state) noexcept {
  if (interpreter_goes_without_us()) park();
  try {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  } catch (abi::__forced_unwind&) {  // the interpreter is finalizing and ends its daemon threads
    park();
  }
}

// Ends a wait when a Python signal handler raised (Ctrl-C), or when the interpreter goes. Called
// without the GIL.
bool signal_raised(void*) {
  ++t_callbacks;
  g_callbacks.fetch_add(1, std::memory_order_seq_cst);
  bool raised = true;
  if (!interpreter_goes_without_us()) {
    nb::gil_scoped_acquire acquired;
    raised = PyErr_CheckSignals() != 0 || StoreCore::Use::of_closed();
  }
  g_callbacks.fetch_sub(1, std::memory_order_seq_cst);
  --t_callbacks;
  return raised;
}

// Runs at exit, after the other threads that Python waits for: daemon threads inside a wait of ours
// leave the core by themselves and never come back to Python.
void begin_exit() {
  g_exiting_thread = pthread_self();
  g_exiting.store(true, std::memory_order_seq_cst);
  const nb::gil_scoped_release released;
  while (g_callbacks.load(std::memory_order_seq_cst) > 0) sched_yield();
}

// The callbacks of the parent's other threads do not end here; a signal handler may fork, too.
void forget_callbacks_of_others() { g_callbacks.store(t_callbacks, std::memory_order_seq_cst); }

}  // namespace

bool interpreter_exits() noexcept { return g_exiting.load(std::memory_order_seq_cst); }

WithoutGil::~WithoutGil() { enter_python(state_); }

nb::object to_str(std::string_view text) {
  return nb::steal(checked(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace")));
}

void raise(const char* error_class, const std::string& message) {
  nb::object type = nb::module_::import_("shmstore.errors").attr(error_class);
  PyErr_SetObject(type.ptr(), to_str(message).ptr());
  nb::raise_python_error();
}

void raise(Status status) {
  if (status == Status::interrupted) {
    if (!PyErr_Occurred()) raise("StoreClosed", "the store was closed during this wait");
    nb::raise_python_error();
  }
  const std::string& detail = shmrl::Store::detail();
  raise(error_class_of(status), detail.empty() ? std::string(to_string(status)) : detail);
}

void raise_full(shmrl::Store& store, Status status, std::uint64_t size) {
  FullFacts facts;
  require(store.full_facts(size, facts));
  nb::dict dict;
  dict["requested"] = facts.requested;
  dict["capacity"] = facts.capacity;
  dict["free"] = facts.free;
  dict["largest_free"] = facts.largest_free;
  dict["building_bytes"] = facts.building_bytes;
  dict["deferred_bytes"] = facts.deferred_bytes;
  dict["waiters"] = facts.waiters;
  nb::list owners;
  for (const OwnerUsage& usage : facts.by_owner)
    owners.append(nb::make_tuple(to_str(usage.owner), usage.sessions, usage.objects, usage.bytes));
  dict["owners"] = owners;
  nb::list clients;
  for (const ClientUsage& usage : facts.by_client)
    clients.append(nb::make_tuple(usage.slot, usage.pid, usage.held_objects, usage.held_bytes,
                                  usage.pins, usage.pinned_bytes));
  dict["clients"] = clients;
  nb::object error = nb::steal(
      checked(PyObject_CallFunction(g_hooks.store_full, "sO", error_class_of(status), dict.ptr())));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  nb::raise_python_error();
}

Wait parse_timeout(nb::handle timeout) {
  Wait wait{0, &signal_raised, nullptr};
  if (timeout.is_none()) return wait;
  double seconds = std::nan("");
  if (PyFloat_Check(timeout.ptr()))
    seconds = PyFloat_AS_DOUBLE(timeout.ptr());
  else if (!PyBool_Check(timeout.ptr()) && PyNumber_Check(timeout.ptr()))
    seconds = PyFloat_AsDouble(timeout.ptr());
  if (PyErr_Occurred()) PyErr_Clear();  // a number too large for a double: not a time-out either
  if (!(seconds >= 0))
    raise("BadValue",
          "timeout must be None (do not wait), a number of seconds from 0 up, or math.inf");
  constexpr double kForEverFrom = 9.0e9;  // 285 years: beyond int64 nanoseconds
  wait.timeout_ns = seconds > kForEverFrom ? -1 : static_cast<std::int64_t>(seconds * 1e9);
  return wait;
}

std::string_view parse_text(nb::handle text, const char* what) {
  if (!PyUnicode_Check(text.ptr())) [[unlikely]]
    raise("BadName", std::string(what) + " must be a str, not " + Py_TYPE(text.ptr())->tp_name);
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    raise("BadName", std::string(what) + " must be encodable as UTF-8");
  }
  return {data, static_cast<std::size_t>(size)};
}

bool parse_flag(nb::handle flag, const char* what) {
  if (!PyBool_Check(flag.ptr())) [[unlikely]]
    raise("BadValue",
          std::string(what) + " must be True or False, not a " + Py_TYPE(flag.ptr())->tp_name);
  return flag.ptr() == Py_True;
}

void bind_waits() {
  set_wait_hooks({&leave_python, &enter_python});
  ::pthread_atfork(nullptr, nullptr, &forget_callbacks_of_others);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&begin_exit));
}

}  // namespace shmrl::py
