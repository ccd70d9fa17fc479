// Threads of one process that share a store, meant to be run under ThreadSanitizer as well.
//
//   threads [--rounds N]
#include <atomic>
#include <thread>

#include "harness.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

struct Random {
  std::uint32_t state;
  std::uint32_t below(std::uint32_t n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
  }
};

constexpr int kThreads = 4;

Options options() {
  Options o;
  o.capacity = 8u << 20;
  o.max_objects = 4096;
  o.max_sessions = 256;
  return o;
}

void in_threads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// Everybody puts, reads, frees and passes references of everybody's objects.
void mixed_operations_keep_every_byte(Store& store, int rounds) {
  constexpr std::size_t kShared = 64;
  struct Published {
    std::atomic<std::uint64_t> generation{0};
    std::atomic<std::uint32_t> index{0}, check{0};
  };
  std::vector<Published> shared(kShared);
  std::uint64_t const arena = store.arena_id();
  in_threads([&](int me) {
    Random random{static_cast<std::uint32_t>(me) * 7919u + 1u};
    std::vector<Hold> holds;
    for (int round = 0; round < rounds; ++round) {
      if (holds.size() < 20 || random.below(2) == 0) {
        std::uint32_t const size = 8 + random.below(3000);
        Draft draft;
        OK(store.reserve(size, Wait{-1}, draft));
        // Each object carries its own index in every byte: a reader can tell foreign bytes.
        std::memset(draft.data(), static_cast<int>(draft.ref().generation & 0xFF), size);
        Hold hold;
        OK(store.seal(draft, &hold));
        Published& slot = shared[random.below(kShared)];
        slot.generation.store(hold.ref().generation, std::memory_order_relaxed);
        slot.index.store(hold.ref().index, std::memory_order_relaxed);
        slot.check.store(hold.ref().check, std::memory_order_release);
        holds.push_back(std::move(hold));
      } else {
        std::size_t const at = random.below(static_cast<std::uint32_t>(holds.size()));
        std::swap(holds[at], holds.back());
        holds.pop_back();
      }
      Published& slot = shared[random.below(kShared)];
      Ref ref;
      ref.arena = arena;
      ref.check = slot.check.load(std::memory_order_acquire);
      ref.index = slot.index.load(std::memory_order_relaxed);
      ref.generation = slot.generation.load(std::memory_order_relaxed);
      if (!well_formed(ref)) continue;  // torn by another publisher
      Hold hold;
      Pin pin;
      Status const held = store.hold(ref, hold);
      Status const pinned = store.pin(ref, Wait{}, pin);
      EXPECT(held == Status::ok || held == Status::freed);
      EXPECT(pinned == Status::ok || pinned == Status::freed);
      // What this thread holds cannot end: nothing here is freed by force.
      if (held == Status::ok) EXPECT(pinned == Status::ok);
      if (pinned == Status::ok) EXPECT(holds_only(pin, static_cast<int>(ref.generation & 0xFF)));
    }
  });
  Stats stats;
  OK(store.stats(stats));
  EXPECT(stats.objects == 0 && stats.used == 0 && stats.pinned == 0);
  EXPECT_SOUND(store);
}

// One object, held and dropped by all at once: the last drop ends it, and no drop before.
void the_last_of_many_drops_ends_the_object(Store& store, int rounds) {
  for (int round = 0; round < rounds / 10; ++round) {
    Hold first = put(store, 100, 1);
    Ref const ref = first.ref();
    std::atomic<int> ready{0};
    in_threads([&](int) {
      Hold mine;
      OK(store.hold(ref, mine));
      ready.fetch_add(1, std::memory_order_acq_rel);
      while (ready.load(std::memory_order_acquire) < kThreads) std::this_thread::yield();
      for (int i = 0; i < 20; ++i) {
        Hold again;
        OK(store.hold(ref, again));
        Pin pin;
        OK(store.pin(ref, Wait{}, pin));
      }
    });
    EXPECT_STATUS(Status::ok, store.probe(ref));
    first.reset();
    EXPECT_STATUS(Status::freed, store.probe(ref));
  }
}

void sessions_change_hands_once(Store& store, int rounds) {
  std::atomic<std::uint64_t> opened{0}, released{0};
  in_threads([&](int me) {
    Random random{static_cast<std::uint32_t>(me) + 99u};
    std::string const mine = "owner-" + std::to_string(me);
    for (int round = 0; round < rounds; ++round) {
      std::string const id = "s" + std::to_string(random.below(40));
      switch (random.below(4)) {
        case 0: {
          Status const status = store.open(id, mine);
          EXPECT(status == Status::ok || status == Status::session_exists);
          opened += status == Status::ok ? 1 : 0;
          break;
        }
        case 1: {
          Draft draft;
          if (store.reserve(64 + random.below(500), id, Wait{-1}, draft) != Status::ok) break;
          Status const status = store.seal(draft, nullptr);
          EXPECT(status == Status::ok || status == Status::session_released);
          break;
        }
        case 2: {
          std::vector<std::string> moved;
          std::vector<Refusal> refused;
          Ids const ids = {id, "s1", "s2"};
          OK(store.transfer(ids, "owner-" + std::to_string(random.below(kThreads)), mine, false,
                            moved, refused));
          break;
        }
        default: {
          std::vector<std::string> done;
          std::vector<Refusal> refused;
          Ids const ids = {id, "s3"};
          OK(store.release(ids, mine, false, done, refused));
          released += done.size();
        }
      }
    }
  });
  std::vector<std::string> left;
  OK(store.list("", left));
  EXPECT(opened == released + left.size());
  std::vector<std::string> done;
  std::vector<Refusal> refused;
  OK(store.release(Ids(left.begin(), left.end()), "*", true, done, refused));
  Stats stats;
  OK(store.stats(stats));
  EXPECT(stats.objects == 0 && stats.used == 0);
  EXPECT_SOUND(store);
}

void a_close_under_calls_answers_closed(int rounds) {
  for (int round = 0; round < rounds / 50 + 1; ++round) {
    std::string const name = unique_name("closing");
    auto store = create(name, options());
    std::atomic<bool> started{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
      threads.emplace_back([&] {
        for (;;) {
          Draft draft;
          Status const status = store->reserve(1000, Wait{}, draft);
          started = true;
          if (status == Status::closed) return;
          if (status == Status::full) continue;  // the third thread has all of it
          OK(status);
          Hold hold;
          Pin pin;
          Status const sealed = store->seal(draft, &hold);
          EXPECT(sealed == Status::ok || sealed == Status::closed);
          if (sealed == Status::ok) (void)store->pin(hold.ref(), Wait{}, pin);
        }
      });
    // A reservation that waits for ever must come back as well.
    threads.emplace_back([&] {
      Draft whole;
      (void)store->reserve(8u << 20, Wait{}, whole);
      Draft more;
      Status const status = store->reserve(8u << 20, Wait{-1}, more);
      EXPECT(status == Status::closed || status == Status::ok);
    });
    while (!started) std::this_thread::yield();
    store->close();
    for (std::thread& thread : threads) thread.join();
    store.reset();
    auto again = attach(name);
    EXPECT_SOUND(*again);
    Stats stats;
    OK(again->stats(stats));
    EXPECT(stats.clients == 1 && stats.used == 0);
    again.reset();
    OK(Store::unlink(name));
  }
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = argc == 3 && std::string(argv[1]) == "--rounds" ? std::atoi(argv[2]) : 2000;
  std::string const name = unique_name("threads");
  auto store = create(name, options());
  mixed_operations_keep_every_byte(*store, rounds);
  the_last_of_many_drops_ends_the_object(*store, rounds);
  sessions_change_hands_once(*store, rounds);
  store.reset();
  OK(Store::unlink(name));
  a_close_under_calls_answers_closed(rounds);
  std::printf("threads: all sound\n");
  return 0;
}
