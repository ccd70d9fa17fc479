// Rules about arenas by name: create, attach, unlink, list, debris.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <thread>

#include "crash_point.h"
#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

RULE(names_of_arenas_are_checked) {
  std::unique_ptr<Store> store;
  for (std::string_view bad : {"", ".", "-x", "a/b", "a b", "ü"})
    EXPECT_STATUS(Status::bad_name, Store::create(bad, small(), store));
  EXPECT_STATUS(Status::bad_name, Store::create(std::string(65, 'a'), small(), store));
  EXPECT_STATUS(Status::not_found, Store::attach(unique_name("none"), {}, store));
  EXPECT_STATUS(Status::not_found, Store::unlink(unique_name("none")));
  Options o = small();
  o.capacity = 100;
  EXPECT_STATUS(Status::bad_option, Store::create("x", o, store));
  o.capacity = kCapacityMax + 1;
  EXPECT_STATUS(Status::bad_option, Store::create("x", o, store));
  o.capacity =
      kCapacityMax;  // more than any /dev/shm: refused now, not by a bus error later (vllm#48879)
  EXPECT_STATUS(Status::no_memory, Store::create(unique_name("huge"), o, store));
}

RULE(a_name_in_use_is_refused_and_debris_is_replaced) {  // iceoryx#653
  std::string const name = unique_name("debris");
  EXPECT(was_killed(wait_for(start([&] {
    auto store = create(name, small());
    put(*store, 100, 1).reset();
    die();
  }))));
  auto store = create(name, small());  // right after the kill
  std::unique_ptr<Store> another;
  EXPECT_STATUS(Status::exists, Store::create(name, small(), another));
  EXPECT(exited_well(wait_for(start([&] {
    std::unique_ptr<Store> mine;
    EXPECT_STATUS(Status::exists, Store::create(name, small(), mine));
  }))));
  EXPECT_SOUND(*store);
  store.reset();
  OK(Store::unlink(name));
}

// Returns what was there.
std::uint64_t patch_file(const std::string& path, off_t at, std::uint64_t value) {
  int const fd = ::open(path.c_str(), O_RDWR);
  std::uint64_t old = 0;
  EXPECT(::pread(fd, &old, sizeof old, at) == sizeof old);
  EXPECT(::pwrite(fd, &value, sizeof value, at) == sizeof value);
  ::close(fd);
  return old;
}

RULE(a_late_unlink_spares_the_successor) {  // vllm#57422
  std::string const name = unique_name("late");
  auto store = create(name, small());
  store->close();
  Pipe ready, go;
  pid_t const child = start([&] {
    auto successor = create(name, small());
    ready.send(1);
    go.receive<int>();
    EXPECT_SOUND(*successor);
    successor.reset();
    OK(Store::unlink(name));
  });
  ready.receive<int>();
  EXPECT_STATUS(Status::superseded, Store::unlink(name));
  std::uint64_t const version = patch_file(store->path(), 8, layout_version() + 7);
  EXPECT_STATUS(Status::superseded, Store::unlink(name));  // one of another layout is spared, too
  patch_file(store->path(), 8, version);
  go.send(1);
  EXPECT(exited_well(wait_for(child)));
  // One whose users are dead is debris, whoever made it.
  EXPECT(was_killed(wait_for(start([&] {
    auto successor = create(name, small());
    die();
  }))));
  OK(Store::unlink(name));
}

RULE(an_unlinked_arena_goes_on_for_its_clients) {  // cpython#82300
  Fixture f;
  Hold hold = put(*f.store, 100, 4);
  EXPECT(exited_well(wait_for(start([&] {
    auto store = attach(f.name);
    store->close();  // an attacher's exit takes nothing away
  }))));
  OK(Store::unlink(f.name));
  Pin pin;
  OK(f.store->pin(hold.ref(), Wait{}, pin));
  EXPECT(holds_only(pin, 4));
  auto successor = create(f.name, small());
  EXPECT(successor->arena_id() != f.store->arena_id());
  EXPECT_STATUS(Status::foreign_ref, pin_status(*successor, hold.ref()));
}

RULE(racing_creators_have_one_winner) {
  for (int round = 0; round < 10; ++round) {
    std::string const name = unique_name("race");
    Pipe go, won, finish;
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i)
      children.push_back(start([&] {
        go.receive<int>();
        std::unique_ptr<Store> store;
        Status const status = Store::create(name, small(), store);
        EXPECT(status == Status::ok || status == Status::exists);
        if (status != Status::ok) OK(Store::attach(name, {}, store));
        won.send(status == Status::ok ? 1 : 0);
        put(*store, 100, i).reset();
        finish.receive<int>();
        store->close();
      }));
    for (int i = 0; i < 4; ++i) go.send(1);
    int winners = 0;
    for (int i = 0; i < 4; ++i) winners += won.receive<int>();
    EXPECT(winners == 1);
    for (int i = 0; i < 4; ++i) finish.send(1);
    for (pid_t child : children) EXPECT(exited_well(wait_for(child)));
    OK(Store::unlink(name));
  }
}

RULE(list_shows_the_living_and_the_debris_and_disturbs_nobody) {
  std::string const name = unique_name("listed");
  EXPECT(was_killed(wait_for(start([&] {
    auto store = create(name, small());
    die();
  }))));
  Fixture f;
  auto find = [](const std::vector<ArenaInfo>& all, const std::string& wanted) -> const ArenaInfo* {
    for (const ArenaInfo& info : all)
      if (info.name == wanted) return &info;
    return nullptr;
  };
  std::vector<ArenaInfo> all;
  OK(Store::list(all));
  EXPECT(find(all, name) != nullptr && find(all, name)->live_clients == 0);
  EXPECT(find(all, f.name) != nullptr && find(all, f.name)->live_clients == 1);
  // Looking did not drop our own locks.
  EXPECT(exited_well(wait_for(start([&] {
    OK(Store::list(all));
    EXPECT(find(all, f.name) != nullptr && find(all, f.name)->live_clients == 1);
  }))));
  OK(Store::unlink(name));
}

// Stops a child after each of its stores in turn while it acts on "a", and calls `look` each time.
void stop_everywhere(const std::function<void()>& prepare, const std::function<Status()>& act,
                     const std::function<void(pid_t)>& look) {
  for (std::uint64_t n = 1;; ++n) {
    pid_t const child = start([&] {
      prepare();
      crash::arm(n, SIGSTOP);
      Status const status = act();
      EXPECT(status == Status::ok || status == Status::exists || status == Status::not_found);
    });
    int status = 0;
    EXPECT(::waitpid(child, &status, WUNTRACED) == child);
    if (!WIFSTOPPED(status)) {
      EXPECT(exited_well(status));
      return;
    }
    look(child);
    ::kill(child, SIGCONT);
    EXPECT(exited_well(wait_for(child)));
  }
}

RULE(a_process_stopped_anywhere_in_create_attach_or_unlink_delays_only_those_who_want_that_name) {
  Folder folder;
  Options options = small();
  options.directory = folder;
  options.lock_limit_ns = 2'000'000;
  AttachOptions const there{.directory = folder, .lock_limit_ns = 2'000'000};
  auto kept = create("kept", options);
  int stuck = 0;
  auto look = [&](pid_t stopped) {
    auto other = create("b", options);
    put(*attach("b", there), 100, 1).reset();
    for (const ArenaInfo& info : folder.list()) {
      // Between the making of its name lock and the taking, that file looks like a leftover.
      EXPECT(info.name == "a" || info.name == "b" || info.name == "kept" ||
             info.path.ends_with("a~name"));
      if (info.name == "kept") EXPECT(info.live_clients == 1);
    }
    std::unique_ptr<Store> mine;
    Status const status = Store::attach("a", there, mine);
    if (status == Status::stuck) {
      ++stuck;
      EXPECT(Store::detail().find(std::to_string(stopped)) != std::string::npos);
      // It lives: not one of its files is debris.
      if (stuck % 8 == 0) EXPECT(folder.remove_debris().empty());
    }
    mine.reset();
    other.reset();
    OK(Store::unlink("b", folder));
  };
  auto make = [&] {
    std::unique_ptr<Store> store;
    return Store::create("a", options, store);
  };
  auto nothing = [] {};
  stop_everywhere(nothing, make, look);
  EXPECT(stuck > 20);
  stuck = 0;
  stop_everywhere(
      nothing,
      [&] {
        std::unique_ptr<Store> store;
        return Store::attach("a", there, store);
      },
      look);
  EXPECT(stuck > 5);
  OK(Store::unlink("a", folder));
  stuck = 0;
  stop_everywhere([&] { (void)make(); }, [&] { return Store::unlink("a", folder); }, look);
  EXPECT(stuck > 0);
  kept.reset();
  OK(Store::unlink("kept", folder));
}

RULE(a_thread_that_waits_for_a_stopped_peer_blocks_no_other_arena_of_its_process) {
  Fixture f;
  pid_t const peer = start([&] {
    auto store = attach(f.name);
    crash::arm(3, SIGSTOP);  // in the middle of the transaction
    OK(store->open("s", "p"));
  });
  int status = 0;
  EXPECT(::waitpid(peer, &status, WUNTRACED) == peer && WIFSTOPPED(status));
  std::unique_ptr<Store> held = std::move(f.store);  // closed by a thread: waits for the lock too
  pid_t const child = start([&] {
    held.release();
    std::atomic<bool> joined{false};
    std::thread waits([&] {
      auto store = attach(f.name);
      joined.store(true, std::memory_order_relaxed);
    });
    Options other = small();
    std::string const name = unique_name("other");
    create(name, other)->close();  // while the thread waits
    put(*attach(name), 10, 1).reset();
    std::vector<ArenaInfo> all;
    OK(Store::list(all));
    OK(Store::unlink(name));
    EXPECT(exited_well(wait_for(start([] {}))));  // fork does not wait either
    EXPECT(!joined.load(std::memory_order_relaxed));
    ::kill(peer, SIGCONT);
    waits.join();
  });
  EXPECT(exited_well(wait_for(child)));
  EXPECT(exited_well(wait_for(peer)));
  f.store = std::move(held);
}

RULE(damaged_files_are_refused) {
  Folder folder;
  Options options = small();
  options.directory = folder;
  AttachOptions const there{.directory = folder};
  std::string const name = "damaged";
  EXPECT(was_killed(wait_for(start([&] {
    auto store = create(name, options);
    die();
  }))));
  std::vector<ArenaInfo> const all = folder.list();
  EXPECT(all.size() == 1 && all[0].name == name);
  std::string const path = all[0].path;
  auto patch = [&](off_t at, std::uint64_t value) { return patch_file(path, at, value); };
  std::unique_ptr<Store> store;
  std::uint64_t old = patch(0, 42);
  EXPECT_STATUS(Status::corrupt, Store::attach(name, there, store));
  patch(0, old);
  old = patch(8, old + 7);
  EXPECT_STATUS(Status::layout_mismatch, Store::attach(name, there, store));
  patch(8, old);
  struct stat info{};
  EXPECT(::stat(path.c_str(), &info) == 0);
  EXPECT(::truncate(path.c_str(), info.st_size / 2) == 0);
  EXPECT_STATUS(Status::corrupt, Store::attach(name, there, store));
  EXPECT(::truncate(path.c_str(), 100) == 0);
  EXPECT_STATUS(Status::corrupt, Store::attach(name, there, store));
  std::vector<ArenaInfo> const removed = folder.remove_debris();
  EXPECT(removed.size() == 1 && removed[0].name == name && removed[0].status == Status::corrupt);
}

}  // namespace
