// The handle that shmstore.Store derives from. Decides nothing: it turns Python values into calls
// of store.h and Status into exceptions.
#pragma once

#include <memory>

#include "bindings_ref.h"

namespace shmrl::py {

class StoreCore {
 public:
  explicit StoreCore(bool allow_pickle) : allow_pickle(allow_pickle) {}
  ~StoreCore() { close(); }
  StoreCore(const StoreCore&) = delete;
  StoreCore& operator=(const StoreCore&) = delete;

  // StoreClosed when it was never opened; a closed or forked one answers by status.
  shmrl::Store& store() const {
    if (!store_) [[unlikely]]
      raise("StoreClosed",
            "this store was never opened; use Store.create(name, capacity) or Store.attach(name)");
    return *store_;
  }
  void open(std::unique_ptr<shmrl::Store> store);
  void close() noexcept;
  bool is_open() const noexcept { return store_ && store_->is_open(); }

  const bool allow_pickle;

 private:
  std::unique_ptr<shmrl::Store> store_;
};

void bind_objects(nb::class_<StoreCore>& type);   // put, get, free, build (bindings_objects.cc)
void bind_sessions(nb::class_<StoreCore>& type);  // the session table (bindings_sessions.cc)
void bind_admin(nb::class_<StoreCore>& type, nb::module_& module);  // create, stats (bindings.cc)

}  // namespace shmrl::py
