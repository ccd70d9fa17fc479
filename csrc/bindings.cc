// The module shmstore._core: opening arenas, their state, errors, and the registration of the rest.
//
// Bindings translate, drop the GIL around waits and large copies, and decide nothing. Anything that
// a user can get wrong leaves as a class of shmstore.errors.

#include <nanobind/stl/string.h>

#include <vector>

#include "bindings_store.h"
#include "bindings_values.h"

namespace shmrl::py {

Hooks g_hooks;

void bind_copy(nb::module_& module);  // bindings_objects.cc

// -- StoreCore -----------------------------------------------------------------

void StoreCore::open(std::unique_ptr<shmrl::Store> store) {
  if (!facts_.name.empty()) raise("BadValue", "this store was opened already");
  store_ = std::move(store);
  facts_ = {store_->arena_id(), store_->capacity(), store_->name(), store_->path()};
  register_store(facts_.arena_id, this);
}

thread_local const StoreCore::Use* StoreCore::Use::innermost_ = nullptr;

bool StoreCore::in_use_by_this_thread() const noexcept {
  for (const Use* use = Use::innermost_; use != nullptr; use = use->outer_)
    if (&use->core_ == this) return true;
  return false;
}

void StoreCore::close() noexcept {
  if (!store_ || closed_) return;
  closed_ = true;
  unregister_store(facts_.arena_id, this);
  // A signal handler that runs inside a wait of this thread: that wait ends at once, and closes.
  if (in_use_by_this_thread()) return;
  // A daemon thread that wanted the GIL back inside a call stays in it: that call never ends, and
  // what is ours in the arena goes with the process.
  if (interpreter_exits() && store_->in_calls()) {
    (void)store_.release();
    return;
  }
  ++users_;
  {
    // Waits for calls of other threads, and those may want the GIL to run signal handlers.
    const WithoutGil released;
    store_->close();
  }
  if (--users_ == 0) finish_close();
}

// Nobody uses the store any more: leave the arena, and give its memory back if no view is left.
void StoreCore::finish_close() noexcept {
  std::unique_ptr<shmrl::Store> last = std::move(store_);
  const WithoutGil released;
  last->close();
  last.reset();
}

void StoreCore::raise_not_open() const {
  if (closed_) raise("StoreClosed", "this store is closed; views taken before stay valid");
  raise("StoreClosed",
        "this store was never opened; use Store.create(name, capacity) or Store.attach(name)");
}

namespace {

std::int64_t to_ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

// Opens by name without the GIL: the name's lock may be another process's for a while.
template <class ByName>
void open(StoreCore& core, nb::handle name, ByName by_name) {
  const std::string text(parse_text(name, "the name of a store"));
  std::unique_ptr<shmrl::Store> store;
  Status status;
  {
    const WithoutGil released;
    status = by_name(text, store);
  }
  require(status);
  core.open(std::move(store));
}

void create(StoreCore& core, nb::handle name, const nb::dict& limits, const std::string& directory,
            double spin, double lock_limit) {
  Options options;
  const auto limit = [&limits](const char* key) {
    return nb::cast<std::uint64_t>(nb::object(limits[key]));
  };
  options.capacity = limit("capacity");
  options.max_objects = limit("max_objects");
  options.max_sessions = limit("max_sessions");
  options.max_attachments = limit("max_attachments");
  const std::uint64_t owners = limit("max_owners");
  options.max_owners = owners > kOwnersMax ? kOwnersMax + 1 : static_cast<std::uint32_t>(owners);
  options.directory = directory;
  options.spin_ns = to_ns(spin);
  options.lock_limit_ns = to_ns(lock_limit);
  open(core, name, [&](const std::string& text, std::unique_ptr<shmrl::Store>& store) {
    return shmrl::Store::create(text, options, store);
  });
}

void attach(StoreCore& core, nb::handle name, const std::string& directory, double spin,
            double lock_limit) {
  AttachOptions options;
  options.directory = directory;
  options.spin_ns = to_ns(spin);
  options.lock_limit_ns = to_ns(lock_limit);
  open(core, name, [&](const std::string& text, std::unique_ptr<shmrl::Store>& store) {
    return shmrl::Store::attach(text, options, store);
  });
}

nb::dict stats(StoreCore& core) {
  Stats stats;
  require(StoreCore::Use(core)->stats(stats));
  nb::dict out;
  out["capacity"] = stats.capacity;
  out["used"] = stats.used;
  out["free"] = stats.free;
  out["largest_free"] = stats.largest_free;
  out["committed"] = stats.committed;
  out["objects"] = stats.objects;
  out["building"] = stats.building;
  out["doomed"] = stats.doomed;
  out["sessions"] = stats.sessions;
  out["pinned"] = stats.pinned;
  out["deferred_bytes"] = stats.deferred_bytes;
  out["clients"] = stats.clients;
  out["objects_max"] = stats.max_objects;
  out["sessions_max"] = stats.max_sessions;
  out["owners_max"] = stats.max_owners;
  out["attachments_max"] = stats.max_attachments;
  nb::list owners;
  for (const OwnerUsage& usage : stats.by_owner)
    owners.append(nb::make_tuple(to_str(usage.owner), usage.sessions, usage.objects, usage.bytes,
                                 usage.bound_clients, to_str(usage.heir)));
  out["by_owner"] = owners;
  nb::list clients;
  for (const ClientUsage& usage : stats.by_client)
    clients.append(nb::make_tuple(usage.slot, usage.pid, usage.self, usage.pins));
  out["by_client"] = clients;
  const Counters& counts = stats.counters;
  out["counters"] =
      nb::make_tuple(counts.puts, counts.gets, counts.frees, counts.discards, counts.reclaimed,
                     counts.sessions_opened, counts.sessions_released, counts.sessions_transferred,
                     counts.sweeps, counts.recoveries, counts.full_waits);
  return out;
}

nb::list check(StoreCore& core) {
  std::vector<std::string> problems;
  Status status;
  const StoreCore::Use store(core);
  {
    const WithoutGil released;
    status = store->check(problems);
  }
  require(status);
  nb::list list;
  for (const std::string& problem : problems) list.append(to_str(problem));
  return list;
}

nb::tuple sweep(StoreCore& core) {
  SweepReport report;
  Status status;
  const StoreCore::Use store(core);
  {
    const WithoutGil released;
    status = store->sweep(report);
  }
  require(status);
  return nb::make_tuple(report.clients, report.objects, report.bytes, report.sessions_inherited,
                        report.sessions_released);
}

nb::dict to_dict(const ArenaInfo& info) {
  nb::dict out;
  out["name"] = to_str(info.name);
  out["path"] = to_str(info.path);
  out["status"] = to_str(to_string(info.status));
  out["detail"] = to_str(info.detail);
  out["arena_id"] = info.arena_id;
  out["capacity"] = info.capacity;
  out["file_bytes"] = info.file_bytes;
  out["live_clients"] = info.live_clients;
  out["creator_pid"] = info.creator_pid;
  out["created_unix_ns"] = info.created_unix_ns;
  return out;
}

nb::list arenas(const std::string& directory, bool remove_debris) {
  nb::list list;
  std::vector<ArenaInfo> infos;
  Status status;
  {
    const WithoutGil released;
    status = remove_debris ? shmrl::Store::remove_debris(infos, directory)
                           : shmrl::Store::list(infos, directory);
  }
  require(status);
  for (const ArenaInfo& info : infos) list.append(to_dict(info));
  return list;
}

void unlink(nb::handle name, const std::string& directory) {
  const std::string text(parse_text(name, "the name of a store"));
  Status status;
  {
    const WithoutGil released;
    status = shmrl::Store::unlink(text, directory);
  }
  require(status);
}

void register_hooks(nb::handle encode, nb::handle decode, nb::handle to_device,
                    nb::handle store_full, nb::handle entry) {
  g_hooks.encode = Py_NewRef(encode.ptr());
  g_hooks.decode = Py_NewRef(decode.ptr());
  g_hooks.to_device = Py_NewRef(to_device.ptr());
  g_hooks.store_full = Py_NewRef(store_full.ptr());
  g_hooks.entry = Py_NewRef(entry.ptr());
}

nb::tuple payload_mapping(StoreCore& core) {
  const StoreCore::Use store(core);
  const auto bytes = store->payload_mapping();
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(bytes.data()),
                        reinterpret_cast<std::uintptr_t>(store->payload_writable()), bytes.size(),
                        store->payload_committed());
}

std::uintptr_t buffer_address(nb::handle source) {
  Py_buffer view{};
  if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_SIMPLE) < 0) nb::raise_python_error();
  const auto address = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

}  // namespace

void bind_admin(nb::class_<StoreCore>& type, nb::module_& module) {
  using nb::arg;
  type.def(nb::init<bool>(), arg("allow_pickle"))
      .def("open_new", &create, arg("name").none(), arg("limits"), arg("directory"), arg("spin"),
           arg("lock_limit"))
      .def("open_existing", &attach, arg("name").none(), arg("directory"), arg("spin"),
           arg("lock_limit"))
      .def("close", &StoreCore::close)
      .def("raw_stats", &stats)
      .def("check", &check, "Audit the whole arena; [] when sound.")
      .def("raw_sweep", &sweep)
      .def("payload_mapping", &payload_mapping)
      .def(
          "abandon", [](StoreCore& core) { StoreCore::Use(core)->abandon(); },
          "For tests: to every other process this one is dead from now on, without any clean-up.")
      .def_prop_ro("is_open", &StoreCore::is_open)
      .def_prop_ro("allow_pickle", [](StoreCore& core) { return core.allow_pickle; })
      .def_prop_ro("arena_id", [](StoreCore& core) { return core.facts().arena_id; })
      .def_prop_ro("name", [](StoreCore& core) { return to_str(core.facts().name); })
      .def_prop_ro("path", [](StoreCore& core) { return to_str(core.facts().path); })
      .def_prop_ro("capacity", [](StoreCore& core) { return core.facts().capacity; })
      .def_prop_ro("client_slot",
                   [](StoreCore& core) { return StoreCore::Use(core)->client_slot(); });
  module.def("arenas", &arenas, arg("directory"), arg("remove_debris") = false);
  module.def("unlink", &unlink, arg("name").none(), arg("directory"));
  module.def("register_hooks", &register_hooks, arg("encode"), arg("decode"), arg("to_device"),
             arg("store_full"), arg("entry"));
  module.def("buffer_address", &buffer_address, arg("source"));
  module.def("set_leak_warnings", [](bool on) { nb::set_leak_warnings(on); }, arg("on"));
  module.attr("ROWS_MIN") = kRowsMin;
  module.attr("CAPACITY_MIN") = kCapacityMin;
  module.attr("CAPACITY_MAX") = kCapacityMax;
  module.attr("OBJECTS_MAX") = kObjectsMax;
  module.attr("SESSIONS_MAX") = kSessionsMax;
  module.attr("OWNERS_MAX") = kOwnersMax;
  module.attr("CLIENTS_MAX") = kClientsMax;
  module.attr("NAME_BYTES_MAX") = kNameBytesMax;
  module.attr("LAYOUT_VERSION") = layout_version();
}

}  // namespace shmrl::py

NB_MODULE(_core, module) {
  using namespace shmrl::py;
  // A store or a view that lives until the interpreter is gone is a legal program, not a leak.
  nb::set_leak_warnings(false);
  add_types(module);
  nb::class_<StoreCore> type(module, "StoreCore");
  bind_admin(type, module);
  bind_objects(type);
  bind_sessions(type);
  bind_segments(type, module);
  bind_segment_writer(type, module);
  bind_copy(module);
  bind_waits();
}
