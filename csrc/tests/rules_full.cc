// Rules about a full arena: waiting, fairness, figures.

#include <thread>

#include "client.h"
#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

RULE(a_reservation_waits_for_space_and_gets_it) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 100000, 1);
  std::thread waiter([&] {
    Draft draft;
    OK(f.store->reserve(kCapacityMin / 2, Wait{-1}, draft));
  });
  while (f.stats().counters.full_waits == 0) std::this_thread::yield();
  big.reset();
  waiter.join();
}

RULE(space_goes_to_waiters_in_the_order_they_came) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 300000, 1);
  Pipe done;
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(start([&] {
      auto store = attach(f.name);
      Draft draft;
      // Each wants most of the arena: one at a time can have it.
      OK(store->reserve(kCapacityMin - 200000, Wait{-1}, draft));
      done.send(i);
      draft.reset();
      store->close();
    }));
    while (f.stats().counters.full_waits != static_cast<std::uint64_t>(i) + 1)
      std::this_thread::yield();
  }
  big.reset();
  for (int i = 0; i < 4; ++i) EXPECT(done.receive<int>() == i);
  for (pid_t child : children) EXPECT(exited_well(wait_for(child)));
}

RULE(a_place_that_was_left_is_taken_again_at_the_end_of_the_queue) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 300000, 1);
  Pipe done;
  std::uint64_t queued = 0;
  auto wait_in_queue = [&](int who) {
    pid_t const child = start([&] {
      auto store = attach(f.name);
      Draft draft;
      OK(store->reserve(kCapacityMin - 200000, Wait{-1}, draft));
      done.send(who);
      draft.reset();
      store->close();
    });
    ++queued;
    while (f.stats().counters.full_waits != queued) std::this_thread::yield();
    return child;
  };
  pid_t const leaves = wait_in_queue(0);
  std::vector<pid_t> stay{wait_in_queue(1), wait_in_queue(2)};
  ::kill(leaves, SIGKILL);
  EXPECT(was_killed(wait_for(leaves)));
  f.stats();                         // sweeps
  stay.push_back(wait_in_queue(3));  // where the first had been
  big.reset();
  for (int who : {1, 2, 3}) EXPECT(done.receive<int>() == who);
  for (pid_t child : stay) EXPECT(exited_well(wait_for(child)));
}

RULE(two_who_planned_the_same_growth_grow_once) {
  Fixture f(small(64u << 20));
  EXPECT(exited_well(wait_for(start([&] {
    Client client(f.name);
    Txn const txn(client.arena);
    Growth const growth = plan_growth(client.arena, 1 << 20);
    client.arena.reserve_payload(growth.from, growth.to);
    commit_growth(client.arena, txn, growth);
    commit_growth(client.arena, txn, growth);
    EXPECT(client.arena.granules_ready() == growth.to);
  }))));
  EXPECT_SOUND(*f.store);
}

RULE(small_reservations_pass_a_large_one_that_waits_until_as_many_bytes_have) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 300000, 1);
  constexpr std::uint64_t kWanted = 700 << 10;
  Pipe done;
  pid_t const child = start([&] {
    auto store = attach(f.name);
    Draft draft;
    OK(store->reserve(kWanted, Wait{-1}, draft));
    done.send(1);
    draft.reset();
    store->close();
  });
  while (f.stats().counters.full_waits != 1) std::this_thread::yield();
  Draft small_one;
  std::uint64_t passed = 0;
  while (f.store->reserve(64 << 10, Wait{}, small_one) == Status::ok) {
    passed += 64 << 10;
    OK(f.store->discard(small_one));
  }
  EXPECT(passed <= kWanted && passed + (64 << 10) > kWanted);
  // One that waits is behind the large one, and served after it.
  big.reset();
  OK(f.store->reserve(64 << 10, Wait{-1}, small_one));
  EXPECT(done.receive<int>() == 1);
  EXPECT(exited_well(wait_for(child)));
  OK(f.store->discard(small_one));
}

RULE(a_reservation_waits_for_an_entry_of_a_full_table_too) {
  Options options = small();
  options.max_objects = 16;
  Fixture f(options);
  std::vector<Hold> holds;
  for (int i = 0; i < 16; ++i) holds.push_back(put(*f.store, 64, i));
  Draft draft;
  EXPECT_STATUS(Status::objects_full, f.store->reserve(64, Wait{}, draft));
  EXPECT(Store::detail().find("max_objects") != std::string::npos);
  EXPECT_STATUS(Status::objects_full, f.store->reserve(64, Wait{2'000'000}, draft));
  std::thread later([&] {
    while (f.stats().counters.full_waits < 2) std::this_thread::yield();
    holds.pop_back();
  });
  OK(f.store->reserve(64, Wait{-1}, draft));
  later.join();
  OK(f.store->discard(draft));
}

RULE(a_dead_waiter_does_not_block_the_queue) {
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 100000, 1);
  pid_t const child = start([&] {
    auto store = attach(f.name);
    Draft draft;
    (void)store->reserve(kCapacityMin / 2, Wait{-1}, draft);
  });
  while (f.stats().counters.full_waits == 0) std::this_thread::yield();
  ::kill(child, SIGKILL);
  EXPECT(was_killed(wait_for(child)));
  Draft draft;
  OK(f.store->reserve(1000, Wait{}, draft));
}

RULE(full_says_who_holds_the_rest) {
  Fixture f;
  Hold a = put(*f.store, 300000, 1);
  OK(f.store->open("s", "producer"));
  put(*f.store, 400000, 2, "s").reset();
  Draft draft;
  EXPECT_STATUS(Status::full, f.store->reserve(600000, Wait{}, draft));
  FullFacts facts;
  OK(f.store->full_facts(600000, facts));
  EXPECT(facts.requested == 600000 && facts.capacity == kCapacityMin);
  EXPECT(facts.free < 600000 && facts.largest_free <= facts.free);
  EXPECT(facts.by_owner.size() == 1 && facts.by_owner[0].owner == "producer" &&
         facts.by_owner[0].bytes == 400000);
  EXPECT(facts.by_client.size() == 1 && facts.by_client[0].self &&
         facts.by_client[0].held_objects == 1 && facts.by_client[0].held_bytes >= 300000);
}

RULE(freed_neighbours_merge_so_that_free_bytes_are_usable) {  // ray#16164
  Fixture f;
  std::vector<Hold> holds;
  for (int i = 0; i < 15; ++i) holds.push_back(put(*f.store, 65536, i));
  for (std::size_t i = 0; i < holds.size(); i += 2) holds[i].reset();
  Draft draft;
  EXPECT_STATUS(Status::full, f.store->reserve(500000, Wait{}, draft));
  Stats const broken = f.stats();
  EXPECT(broken.free >= 500000 && broken.largest_free < 500000);  // reported, not hidden
  for (std::size_t i = 1; i < holds.size(); i += 2) holds[i].reset();
  EXPECT(f.stats().largest_free == f.stats().free && f.stats().free == kCapacityMin);
  OK(f.store->reserve(kCapacityMin, Wait{}, draft));
}

RULE(what_one_object_gives_back_another_of_its_size_may_take) {
  constexpr std::uint64_t kPage = 4096;
  // Exactly one size, and one of many sizes that share a free list, behind 40 that are too small.
  for (auto [wanted, others] : {std::pair{10, 0}, {79, 65}}) {
    Fixture f(small(16u << 20));
    std::vector<Hold> gaps, walls;
    for (int i = 0; i < (others > 0 ? 41 : 1); ++i) {
      gaps.push_back(
          put(*f.store, static_cast<std::uint64_t>(i == 0 ? wanted : others) * kPage, 1));
      walls.push_back(put(*f.store, 9 * kPage, 2));
    }
    Draft draft;
    for (std::uint64_t pages : {512u, 64u, 9u})
      while (f.store->reserve(pages * kPage, Wait{}, draft) == Status::ok) {
        walls.emplace_back();
        OK(f.store->seal(draft, &walls.back()));
      }
    for (Hold& gap : gaps) gap.reset();
    OK(f.store->reserve(static_cast<std::uint64_t>(wanted) * kPage, Wait{}, draft));
  }
}

RULE(a_failed_reservation_counts_nowhere) {  // v6d#862
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 100000, 1);
  Stats const before = f.stats();
  Draft draft;
  for (int i = 0; i < 100; ++i)
    EXPECT_STATUS(Status::full, f.store->reserve(500000, Wait{}, draft));
  EXPECT(f.stats().used == before.used && f.stats().objects == before.objects);
}

}  // namespace
