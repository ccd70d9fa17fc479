// The handle that shmstore.Store derives from. Decides nothing: it turns Python values into calls
// of store.h and Status into exceptions.
#pragma once

#include <memory>
#include <string>

#include "bindings_ref.h"

namespace shmrl::py {

class StoreCore {
 public:
  explicit StoreCore(bool allow_pickle) : allow_pickle(allow_pickle) {}
  ~StoreCore() { close(); }
  StoreCore(const StoreCore&) = delete;
  StoreCore& operator=(const StoreCore&) = delete;

  void open(std::unique_ptr<shmrl::Store> store);
  // Leaves the arena and gives its memory back, as soon as no other thread is inside a call.
  void close() noexcept;
  bool is_open() const noexcept { return store_ && store_->is_open(); }

  // The store, kept in place for the length of a call: any call of it may wait, and lets go of the
  // GIL then. GIL held at both ends. StoreClosed when the store was never opened or was closed. The
  // uses of a thread nest: a wait runs Python's signal handlers, and those may call us again.
  class Use {
   public:
    explicit Use(StoreCore& core) : core_(core), outer_(innermost_) {
      if (!core.store_ || core.closed_) [[unlikely]]
        core.raise_not_open();
      ++core_.users_;
      innermost_ = this;
    }
    ~Use() {
      innermost_ = outer_;
      if (--core_.users_ == 0 && core_.closed_) core_.finish_close();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    shmrl::Store& operator*() const noexcept { return *core_.store_; }
    shmrl::Store* operator->() const noexcept { return core_.store_.get(); }

    // Whether this thread is inside a use of a store that has been closed meanwhile.
    static bool of_closed() noexcept { return innermost_ != nullptr && innermost_->core_.closed_; }

   private:
    friend class StoreCore;
    StoreCore& core_;
    const Use* outer_;
    static thread_local const Use* innermost_;
  };

  // What stays known after the close.
  struct Facts {
    std::uint64_t arena_id = 0;
    std::uint64_t capacity = 0;
    std::string name;
    std::string path;
  };
  const Facts& facts() const {
    if (facts_.name.empty()) raise_not_open();
    return facts_;
  }

  const bool allow_pickle;

 private:
  [[noreturn]] void raise_not_open() const;
  bool in_use_by_this_thread() const noexcept;
  void finish_close() noexcept;

  std::unique_ptr<shmrl::Store> store_;
  Facts facts_;
  int users_ = 0;
  bool closed_ = false;
};

void bind_objects(nb::class_<StoreCore>& type);   // put, get, free, build (bindings_objects.cc)
void bind_sessions(nb::class_<StoreCore>& type);  // the session table (bindings_sessions.cc)
// segments of the trainer: paths read (bindings_segments.cc), segments written
void bind_segments(nb::class_<StoreCore>& type, nb::module_& module);
void bind_segment_writer(nb::class_<StoreCore>& type, nb::module_& module);
void bind_admin(nb::class_<StoreCore>& type, nb::module_& module);  // create, stats (bindings.cc)

}  // namespace shmrl::py
