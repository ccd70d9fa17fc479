// Rules about objects: bytes, refs, views, holds, drafts, waits for a seal.

#include <atomic>
#include <cstring>
#include <thread>

#include "layout.h"
#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

RULE(an_object_reads_back_what_was_written) {
  Fixture f(small(8u << 20));
  for (std::uint64_t size :
       {0ul, 1ul, 63ul, 64ul, 65ul, 1000ul, 4096ul, 9000ul, 32768ul, 32769ul, 65536ul, 1000000ul}) {
    Hold hold = put(*f.store, size, static_cast<int>(size % 251));
    Pin pin;
    OK(f.store->pin(hold.ref(), Wait{}, pin));
    EXPECT(pin.size() == size);
    EXPECT(holds_only(pin, static_cast<int>(size % 251)));
    EXPECT(reinterpret_cast<std::uintptr_t>(pin.data()) % (size > 32768 ? 4096 : 64) == 0);
  }
  EXPECT(f.stats().objects == 0 && f.stats().used == 0);
}

RULE(objects_of_all_sizes_do_not_overlap) {
  Fixture f(small(16u << 20));
  std::vector<Hold> holds;
  std::vector<std::pair<std::uint64_t, int>> made;
  std::uint32_t random = 12345;
  for (int i = 0; i < 3000; ++i) {
    random = random * 1664525u + 1013904223u;
    if (holds.size() > 400 || (random >> 28) < 4) {
      if (holds.empty()) continue;
      std::size_t const at = random % holds.size();
      Pin pin;
      OK(f.store->pin(holds[at].ref(), Wait{}, pin));
      EXPECT(pin.size() == made[at].first && holds_only(pin, made[at].second));
      pin.reset();
      std::swap(holds[at], holds.back());
      std::swap(made[at], made.back());
      holds.pop_back();
      made.pop_back();
      continue;
    }
    std::uint64_t const size = (random >> 8) % 17 == 0 ? random % 200000 : random % 9000;
    holds.push_back(put(*f.store, size, i % 256));
    made.emplace_back(size, i % 256);
    if (i % 500 == 0) EXPECT_SOUND(*f.store);
  }
  for (std::size_t i = 0; i < holds.size(); ++i) {
    Pin pin;
    OK(f.store->pin(holds[i].ref(), Wait{}, pin));
    EXPECT(pin.size() == made[i].first && holds_only(pin, made[i].second));
  }
}

RULE(objects_one_byte_around_each_size_of_block_do_not_overlap) {
  Fixture f(small(64u << 20));
  std::vector<std::uint64_t> sizes;
  for (std::uint32_t block : kClassBytes)
    for (std::uint64_t size : {block - 1, block, block + 1})
      if (block > 0) sizes.push_back(size);
  for (std::uint64_t granules = 8; granules < 40; ++granules)
    for (std::uint64_t size : {granules * kGranule, granules * kGranule + 1}) sizes.push_back(size);
  std::vector<Hold> holds;
  for (int twin = 0; twin < 2; ++twin)
    for (std::uint64_t size : sizes)
      holds.push_back(put(*f.store, size, static_cast<int>(holds.size() % 251)));
  for (std::size_t i = 0; i < holds.size(); ++i) {
    Pin pin;
    OK(f.store->pin(holds[i].ref(), Wait{}, pin));
    EXPECT(pin.size() == sizes[i % sizes.size()] && holds_only(pin, static_cast<int>(i % 251)));
  }
}

RULE(an_object_may_fill_the_whole_arena) {
  Fixture f;
  put(*f.store, 100, 1).reset();  // leaves an empty slab behind, which must not be in the way
  Hold whole = put(*f.store, kCapacityMin, 3);
  EXPECT(f.stats().free == 0);
  Draft draft;
  EXPECT_STATUS(Status::full, f.store->reserve(kCapacityMin / 2, Wait{}, draft));
  EXPECT_STATUS(Status::too_large, f.store->reserve(kCapacityMin + 1, Wait{-1}, draft));
  whole.reset();
  OK(f.store->reserve(kCapacityMin + 64, Wait{}, draft, 64));  // with a head
  OK(f.store->discard(draft));
  EXPECT_STATUS(Status::too_large, f.store->reserve(kCapacityMin + 65, Wait{-1}, draft, 64));
}

RULE(a_stale_ref_is_an_error_and_never_other_bytes) {
  Fixture f;
  Hold first = put(*f.store, 100, 1);
  Ref const stale = first.ref();
  first.reset();
  Hold second = put(*f.store, 100, 2);  // takes the same entry and the same bytes
  EXPECT(second.ref().index == stale.index);
  EXPECT_STATUS(Status::freed, pin_status(*f.store, stale));
  Hold again;
  EXPECT_STATUS(Status::freed, f.store->hold(stale, again));
  std::uint64_t ended = 0;
  OK(f.store->free({&stale, 1}, false, ended));
  EXPECT(ended == 0);
}

RULE(forged_and_foreign_refs_are_told_apart) {
  Fixture f, g;
  Hold hold = put(*f.store, 100, 1);
  Ref forged = hold.ref();
  forged.index += 1;
  EXPECT_STATUS(Status::bad_ref, pin_status(*f.store, forged));
  forged = hold.ref();
  forged.generation += 100;
  EXPECT_STATUS(Status::bad_ref, pin_status(*f.store, forged));
  EXPECT_STATUS(Status::bad_ref, pin_status(*f.store, Ref{}));
  EXPECT_STATUS(Status::foreign_ref, pin_status(*g.store, hold.ref()));
  EXPECT(well_formed(hold.ref()) && !well_formed(forged));
}

RULE(a_view_keeps_bytes_after_the_end_and_only_then_they_return) {
  Fixture f;
  Hold hold = put(*f.store, 50000, 9);
  Pin pin;
  OK(f.store->pin(hold.ref(), Wait{}, pin));
  std::uint64_t ended = 0;
  Ref const ref = hold.ref();
  OK(f.store->free({&ref, 1}, false, ended));
  EXPECT(ended == 1);
  EXPECT_STATUS(Status::freed, pin_status(*f.store, ref));
  EXPECT(f.stats().deferred_bytes > 0 && f.stats().doomed == 1 && f.stats().objects == 0);
  EXPECT(holds_only(pin, 9));
  pin.reset();
  EXPECT(f.stats().deferred_bytes == 0 && f.stats().used == 0);
}

RULE(an_unattached_object_lives_as_long_as_any_process_holds_it) {
  Fixture f;
  Hold hold = put(*f.store, 100, 1);
  Ref const ref = hold.ref();
  Pipe go, ready;
  pid_t const child = start([&] {
    auto store = attach(f.name);
    Hold mine;
    OK(store->hold(ref, mine));
    ready.send(1);
    go.receive<int>();
    mine.reset();
    store->close();
  });
  ready.receive<int>();
  hold.reset();
  EXPECT_STATUS(Status::ok, f.store->probe(ref));
  go.send(1);
  EXPECT(exited_well(wait_for(child)));
  EXPECT_STATUS(Status::freed, f.store->probe(ref));
}

RULE(holds_are_counted_in_each_process) {
  Fixture f;
  Hold a = put(*f.store, 100, 1), b, c;
  Ref const ref = a.ref();
  OK(f.store->hold(ref, b));
  OK(f.store->hold(ref, c));
  a.reset();
  c.reset();
  EXPECT_STATUS(Status::ok, f.store->probe(ref));
  b.reset();
  EXPECT_STATUS(Status::freed, f.store->probe(ref));
}

RULE(a_discarded_draft_leaves_nothing) {
  Fixture f;
  Ref ref;
  {
    Draft draft;
    OK(f.store->reserve(70000, Wait{}, draft));
    ref = draft.ref();
    EXPECT_STATUS(Status::not_sealed, f.store->probe(ref));
    EXPECT(f.stats().building == 1);
  }
  EXPECT_STATUS(Status::freed, f.store->probe(ref));
  EXPECT(f.stats().used == 0 && f.stats().building == 0);
}

RULE(the_second_result_needs_no_seal_of_the_first) {  // ray#15750
  Fixture f;
  Draft a, b;
  OK(f.store->reserve(400000, Wait{}, a));
  OK(f.store->reserve(400000, Wait{}, b));
  Hold hold;
  OK(f.store->seal(b, &hold));
  OK(f.store->seal(a, &hold));
}

RULE(freeing_a_draft_tells_its_builder) {
  Fixture f;
  Draft draft;
  OK(f.store->reserve(100, Wait{}, draft));
  Ref const ref = draft.ref();
  std::uint64_t ended = 0;
  OK(f.store->free({&ref, 1}, false, ended));
  EXPECT(ended == 1);
  std::memset(draft.data(), 1, 100);  // the bytes are still its own
  EXPECT_STATUS(Status::freed, f.store->seal(draft, nullptr));
  EXPECT(!draft && f.stats().used == 0);
}

RULE(a_freed_draft_is_not_attached_to_its_session) {
  Fixture f;
  OK(f.store->open("s", "p"));
  Draft draft;
  OK(f.store->reserve(100, "s", Wait{}, draft));
  std::uint64_t ended = 0;
  Ref const ref = draft.ref();
  OK(f.store->free({&ref, 1}, true, ended));
  EXPECT_STATUS(Status::freed, f.store->seal(draft, nullptr));
  std::vector<Entry> entries;
  OK(f.store->objects("s", entries));
  EXPECT(ended == 1 && entries.empty() && f.stats().used == 0);
}

RULE(a_late_drop_spares_what_has_the_entry_now) {
  Fixture f;
  Hold old = put(*f.store, 100, 1);
  std::uint64_t ended = 0;
  OK(f.store->free({&old.ref(), 1}, true, ended));
  Hold fresh = put(*f.store, 100, 2);
  EXPECT(fresh.ref().index == old.ref().index);
  old.reset();
  EXPECT_STATUS(Status::ok, f.store->probe(fresh.ref()));
}

RULE(a_seal_can_hand_its_pin_on) {
  Fixture f;
  Draft draft;
  OK(f.store->reserve(50000, Wait{}, draft));
  std::memset(draft.data(), 6, 50000);
  Pin keep;
  OK(f.store->seal(draft, nullptr, -1,
                   &keep));  // nobody holds it: it ends at once, its bytes do not
  EXPECT(f.stats().deferred_bytes > 0 && f.stats().building == 0 && f.stats().pinned == 1);
  EXPECT(holds_only(keep, 6));
  keep.reset();
  EXPECT(f.stats().used == 0 && f.stats().pinned == 0);
}

RULE(a_get_waits_for_the_seal_of_another_process) {
  Options spinning = small();
  for (std::int64_t spin : {0ll, 50'000ll}) {
    spinning.spin_ns = spin;
    Fixture f(spinning);
    Pipe refs, go, finish;
    pid_t const child = start([&] {
      auto store = attach(f.name);
      Draft draft;
      OK(store->reserve(100, Wait{}, draft));
      refs.send(draft.ref());
      go.receive<int>();
      std::memset(draft.data(), 5, 100);
      Hold hold;
      OK(store->seal(draft, &hold));
      finish.receive<int>();
    });
    Ref const ref = refs.receive<Ref>();
    Pin pin;
    EXPECT_STATUS(Status::not_sealed, f.store->pin(ref, Wait{}, pin));
    EXPECT_STATUS(Status::not_sealed, f.store->pin(ref, Wait{1'000'000}, pin));
    go.send(1);
    OK(f.store->pin(ref, Wait{-1}, pin));
    EXPECT(holds_only(pin, 5));
    finish.send(1);
    EXPECT(exited_well(wait_for(child)));
    EXPECT(holds_only(pin, 5));
  }
}

RULE(a_get_ends_when_the_builder_dies) {  // v6d#2072
  Fixture f;
  Pipe refs;
  pid_t const child = start([&] {
    auto store = attach(f.name);
    Draft draft;
    OK(store->reserve(100, Wait{}, draft));
    refs.send(draft.ref());
    ::usleep(20'000);
    die();
  });
  Pin pin;
  Ref const ref = refs.receive<Ref>();
  EXPECT_STATUS(Status::freed, f.store->pin(ref, Wait{-1}, pin));
  EXPECT(was_killed(wait_for(child)));
  EXPECT(f.stats().used == 0);
}

RULE(a_waiter_killed_inside_get_harms_nobody) {  // ray#201
  Fixture f;
  Draft draft;
  OK(f.store->reserve(100, Wait{}, draft));
  Ref const ref = draft.ref();
  Pipe ready;
  pid_t const child = start([&] {
    auto store = attach(f.name);
    ready.send(1);
    Pin pin;
    (void)store->pin(ref, Wait{-1}, pin);
  });
  ready.receive<int>();
  ::usleep(30'000);
  ::kill(child, SIGKILL);
  EXPECT(was_killed(wait_for(child)));
  Hold hold;
  OK(f.store->seal(draft, &hold));
  EXPECT_STATUS(Status::ok, pin_status(*f.store, ref));
}

bool stop_waiting(void* flag) { return static_cast<std::atomic<bool>*>(flag)->load(); }

RULE(waits_can_be_interrupted) {
  Fixture f;
  Draft draft;
  OK(f.store->reserve(100, Wait{}, draft));
  std::atomic<bool> flag{true};
  Pin pin;
  EXPECT_STATUS(Status::interrupted, f.store->pin(draft.ref(), Wait{-1, stop_waiting, &flag}, pin));
  Hold big = put(*f.store, kCapacityMin - 200000, 1);
  Draft more;
  EXPECT_STATUS(Status::interrupted,
                f.store->reserve(kCapacityMin / 2, Wait{-1, stop_waiting, &flag}, more));
  EXPECT(f.stats().counters.full_waits == 1);
}

struct Closing {
  Store* store;
  bool stop;
};

bool close_inside(void* context) {
  auto* const closing = static_cast<Closing*>(context);
  closing->store->close();
  return closing->stop;
}

RULE(a_signal_handler_may_close_the_store_that_waits) {
  for (bool stop : {true, false}) {
    Fixture f;
    pid_t const keeper = start([&] {
      auto store = attach(f.name);
      Hold big = put(*store, kCapacityMin - 100000, 1);
      ::pause();
    });
    while (f.stats().objects == 0) std::this_thread::yield();
    Closing closing{f.store.get(), stop};
    Draft draft;
    EXPECT_STATUS(stop ? Status::interrupted : Status::closed,
                  f.store->reserve(500000, Wait{-1, close_inside, &closing}, draft));
    EXPECT_STATUS(Status::closed, f.store->reserve(100, Wait{}, draft));
    ::kill(keeper, SIGKILL);
    EXPECT(was_killed(wait_for(keeper)));
    auto again = attach(f.name);  // the slot was given up, the place in the queue as well
    Stats stats;
    OK(again->stats(stats));
    EXPECT(stats.clients == 1 && stats.used == 0);
    OK(again->reserve(500000, Wait{}, draft));
    EXPECT_SOUND(*again);
  }
}

RULE(a_draft_of_an_earlier_opening_cannot_be_sealed) {
  Fixture f;
  Draft draft;
  OK(f.store->reserve(1000, Wait{}, draft));
  f.store->close();
  auto again = attach(f.name);
  Hold hold;
  EXPECT_STATUS(Status::bad_draft, again->seal(draft, &hold));
  draft.reset();
  Stats stats;
  OK(again->stats(stats));
  EXPECT(stats.used == 0 && stats.clients == 1);
  EXPECT_SOUND(*again);
}

}  // namespace
