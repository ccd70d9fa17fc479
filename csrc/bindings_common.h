// What the binding files share: the owned PyObject, errors by status, time-outs and texts.
//
// Owns the map from Status to the classes of shmstore.errors. Promises: after a function here has
// thrown nb::python_error, Python's error indicator is set with one of our classes. Callers hold
// the GIL. Used by csrc/bindings*.cc only.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "store.h"

namespace shmrl::py {

namespace nb = nanobind;

// Payloads from here on are copied without the GIL: below it the switch costs more than the copy.
inline constexpr std::size_t kCopyWithoutGilMin = 256 * 1024;

// Raises the exception of shmstore.errors that `status` stands for, with the core's own sentence.
[[noreturn]] void raise(Status status);
[[noreturn]] void raise(const char* error_class, const std::string& message);

inline void require(Status status) {
  if (status != Status::ok) [[unlikely]]
    raise(status);
}

// The sentence for a failed reservation of `size` bytes: figures and holders.
[[noreturn]] void raise_full(shmrl::Store& store, Status status, std::uint64_t size);

// None: do not wait. A number of seconds from 0 up; math.inf waits for ever. BadValue otherwise.
Wait parse_timeout(nb::handle timeout);

// A UTF-8 view of a str, valid while the object lives. BadName when it is not a str.
std::string_view parse_text(nb::handle text, const char* what);

// A bool; BadValue for anything else: `strict="no"` must not mean yes.
bool parse_flag(nb::handle flag, const char* what);

// A str of UTF-8; bytes that are not become escapes.
nb::object to_str(std::string_view text);

// Makes the core let go of the GIL where it waits, and the interpreter's end wait for nobody here.
void bind_waits();

// From the atexit hook of bind_waits on: other threads that want the GIL back never return.
bool interpreter_exits() noexcept;

// Runs without the GIL while it lives. A daemon thread whose interpreter goes away meanwhile stays
// here for ever: taking the GIL back would unwind through frames that cannot be unwound, and abort.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// What the Python face lends the core; shmstore/store.py sets it once, with register_hooks.
struct Hooks {
  PyObject* encode = nullptr;      // (store, value, allow_pickle) -> Encoded(header, size, write)
  PyObject* decode = nullptr;      // (memoryview, allow_pickle) -> value
  PyObject* to_device = nullptr;   // (store, memoryview, device) -> torch tensor
  PyObject* store_full = nullptr;  // (class name, facts dict) -> exception
  PyObject* entry = nullptr;       // sessions.Entry
};
extern Hooks g_hooks;

// Throws nb::python_error when a C API call returned null.
inline PyObject* checked(PyObject* object) {
  if (object == nullptr) [[unlikely]]
    nb::raise_python_error();
  return object;
}

}  // namespace shmrl::py
