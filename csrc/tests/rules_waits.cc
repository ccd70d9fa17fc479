// Rules about wake-ups: whoever ends the reason for a wait wakes those who sleep for it.
//
// The waits of the core also look by themselves every few milliseconds, because a holder may die
// without a word; a wake-up that is forgotten shows as a delay only. So here a sleeper does as the
// core does up to the system call, and then sleeps without looking: nobody but the other side can
// end that sleep before its limit.
#include "client.h"
#include "object_table.h"
#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

constexpr std::int64_t kSleepMaxNs = 30'000'000'000;  // only a forgotten wake-up takes as long

// Until the process sleeps in the kernel. It has said before that it is about to, and sleeps for
// nothing else.
void wait_until_asleep(pid_t pid) {
  std::string const path = "/proc/" + std::to_string(pid) + "/stat";
  for (;;) {
    char text[512] = {};
    FILE* const file = std::fopen(path.c_str(), "r");
    EXPECT(file != nullptr);
    EXPECT(std::fread(text, 1, sizeof text - 1, file) > 0);
    std::fclose(file);
    const char* const after_name = std::strrchr(text, ')');
    EXPECT(after_name != nullptr && after_name[2] != 'Z');
    if (after_name[2] == 'S') return;
    ::usleep(1000);
  }
}

// A child that joins, prepares a sleep on a word of the arena and sleeps until it is woken.
// `prepare` returns the word and the value to sleep on.
struct Sleep {
  const std::uint32_t* word;
  std::uint32_t value;
};
pid_t start_sleeper(const std::string& name, const std::function<Sleep(Arena&)>& prepare) {
  Pipe ready;
  pid_t const child = start([&] {
    Client client(name);
    Sleep const sleep = prepare(client.arena);
    ready.send(1);
    FutexResult const result = futex_wait(sleep.word, sleep.value, kSleepMaxNs);
    EXPECT(result == FutexResult::woken_or_changed);
    EXPECT(__atomic_load_n(sleep.word, __ATOMIC_RELAXED) != sleep.value);
  });
  ready.receive<int>();
  wait_until_asleep(child);
  return child;
}

// A child that holds the arena's lock until it is told to let go.
class Holder {
 public:
  explicit Holder(const std::string& name) {
    child_ = start([&] {
      Client client(name);
      ReadLock const lock(client.arena);
      held_.send(1);
      let_go_.receive<int>();
    });
    held_.receive<int>();
  }
  void let_go() {
    let_go_.send(1);
    EXPECT(exited_well(wait_for(child_)));
  }

 private:
  pid_t child_;
  Pipe held_, let_go_;
};

RULE(letting_the_lock_go_wakes_one_who_sleeps_for_it) {
  Fixture f;
  // The sleeper joins while the lock is free, and goes to sleep once it is held.
  Pipe joined, held;
  pid_t const sleeper = start([&] {
    Client client(f.name);
    joined.send(1);
    held.receive<int>();
    Shared<std::uint32_t>& lock = client.arena.header().lock;
    std::uint32_t const word = lock.fetch_or(kLockWaiters, std::memory_order_relaxed);
    EXPECT(word != 0);
    joined.send(1);
    EXPECT(futex_wait(lock.address(), word | kLockWaiters, kSleepMaxNs) ==
           FutexResult::woken_or_changed);
  });
  joined.receive<int>();
  Holder holder(f.name);
  held.send(1);
  joined.receive<int>();
  wait_until_asleep(sleeper);
  holder.let_go();
  EXPECT(exited_well(wait_for(sleeper)));
}

RULE(who_slept_for_the_lock_wakes_the_next_sleeper) {
  Fixture f;
  Pipe joined, held;
  pid_t const waiter = start([&] {
    Client client(f.name);
    joined.send(1);
    held.receive<int>();
    joined.send(1);
    ReadLock const lock(client.arena);
    // Others may have gone to sleep beside it: its own release must wake one.
    EXPECT((client.arena.header().lock.load(std::memory_order_relaxed) & kLockWaiters) != 0);
  });
  joined.receive<int>();
  Holder holder(f.name);
  held.send(1);
  joined.receive<int>();
  wait_until_asleep(waiter);
  holder.let_go();
  EXPECT(exited_well(wait_for(waiter)));
}

RULE(whatever_ends_a_building_wakes_who_waits_for_it) {
  Fixture f;
  std::vector<std::function<void(Draft&)>> ends = {
      [&](Draft& draft) {
        Hold hold;
        OK(f.store->seal(draft, &hold));
      },
      [&](Draft& draft) { OK(f.store->discard(draft)); },
      [&](Draft& draft) {
        std::uint64_t ended = 0;
        Ref const ref = draft.ref();
        OK(f.store->free({&ref, 1}, true, ended));
      },
  };
  for (const auto& end : ends) {
    Draft draft;
    OK(f.store->reserve(100, Wait{}, draft));
    std::uint32_t const index = draft.ref().index;
    pid_t const sleeper = start_sleeper(f.name, [index](Arena& arena) {
      Shared<std::uint64_t>& state = arena.object(index).state;
      std::uint64_t const word = state.fetch_or(object_state::kWaiters, std::memory_order_relaxed) |
                                 object_state::kWaiters;
      return Sleep{reinterpret_cast<const std::uint32_t*>(state.address()),
                   static_cast<std::uint32_t>(word)};
    });
    end(draft);
    EXPECT(exited_well(wait_for(sleeper)));
  }
}

// A place in the queue for space, as store_reservation.cc takes one.
Sleep queue_up(Arena& arena, std::uint64_t size) {
  Txn const txn(arena);
  Header& h = arena.header();
  std::uint32_t i = 0;
  while (arena.waiter(i).ticket.get() != 0) ++i;
  WaiterEntry& w = arena.waiter(i);
  w.size.set(txn, size);
  w.passed.set(txn, 0);
  w.slot.set(txn, arena.slot());
  w.wake.store(wake::kAsleep, std::memory_order_relaxed);
  w.ticket.set(txn, h.next_ticket.get());
  h.next_ticket.add(txn, 1);
  h.waiters.add(txn, 1);
  return {w.wake.address(), wake::kAsleep};
}

RULE(bytes_that_come_back_wake_the_queue_for_space) {
  Fixture f;
  for (std::uint64_t size : {std::uint64_t{100}, std::uint64_t{100'000}}) {  // slab slot, extent
    Hold hold = put(*f.store, size, 1);
    pid_t const sleeper = start_sleeper(f.name, [](Arena& arena) { return queue_up(arena, 64); });
    hold.reset();
    EXPECT(exited_well(wait_for(sleeper)));
    f.stats();  // sweeps: its place in the queue goes with it
  }
}

RULE(a_death_in_the_queue_wakes_those_behind) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 100'000, 1);
  pid_t const first = start([&] {
    Draft draft;
    (void)attach(f.name)->reserve(kCapacityMin / 2, Wait{-1}, draft);
  });
  while (f.stats().counters.full_waits == 0) ::usleep(1000);
  pid_t const sleeper =
      start_sleeper(f.name, [](Arena& arena) { return queue_up(arena, kCapacityMin / 2); });
  ::kill(first, SIGKILL);
  EXPECT(was_killed(wait_for(first)));
  SweepReport report;
  OK(f.store->sweep(report));
  EXPECT(report.clients == 1);
  EXPECT(exited_well(wait_for(sleeper)));
}

RULE(a_repair_wakes_the_queue_for_space) {  // the dead may have given bytes back and told nobody
  Fixture f;
  pid_t const sleeper = start_sleeper(f.name, [](Arena& arena) { return queue_up(arena, 64); });
  die_inside_a_transaction(f.name);
  EXPECT(f.stats().counters.recoveries == 1);
  EXPECT(exited_well(wait_for(sleeper)));
}

RULE(leaving_the_queue_wakes_those_behind) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 100'000, 1);
  Pipe go;
  pid_t const first = start([&] {
    auto store = attach(f.name);
    Draft draft;
    auto leave_when_told = [](void* pipe) {
      static_cast<Pipe*>(pipe)->receive<int>();
      return true;
    };
    EXPECT_STATUS(Status::interrupted,
                  store->reserve(kCapacityMin / 2, Wait{-1, leave_when_told, &go}, draft));
    store->close();
  });
  while (f.stats().counters.full_waits == 0) ::usleep(1000);
  pid_t const sleeper =
      start_sleeper(f.name, [](Arena& arena) { return queue_up(arena, kCapacityMin / 2); });
  go.send(1);
  EXPECT(exited_well(wait_for(first)));
  EXPECT(exited_well(wait_for(sleeper)));
}

}  // namespace
