// What the facade promises, one function a claim. Real processes, real signals.
//
//   rules [name ...]     runs those tests (default: all)    rules --list
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "arena_file.h"
#include "harness.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

Options small(std::uint64_t capacity = kCapacityMin) {
  Options o;
  o.capacity = capacity;
  o.max_objects = 4096;
  o.max_sessions = 256;
  o.max_owners = 16;
  return o;
}

// An arena for one test; gone, with its name, when the test ends.
struct Fixture {
  explicit Fixture(Options options = small()) : name(unique_name("rules")) {
    store = create(name, options);
  }
  ~Fixture() {
    if (!store) return;
    if (store->is_open()) EXPECT_SOUND(*store);
    store.reset();
    (void)Store::unlink(name);
  }
  std::string name;
  std::unique_ptr<Store> store;
  Stats stats() {
    Stats s;
    OK(store->stats(s));
    return s;
  }
};

Status pin_status(Store& store, const Ref& ref) {
  Pin pin;
  return store.pin(ref, Wait{}, pin);
}

// -- objects -------------------------------------------------------------------

void an_object_reads_back_what_was_written() {
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

void objects_of_all_sizes_do_not_overlap() {
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

void an_object_may_fill_the_whole_arena() {
  Fixture f;
  put(*f.store, 100, 1).reset();  // leaves an empty slab behind, which must not be in the way
  Hold whole = put(*f.store, kCapacityMin, 3);
  EXPECT(f.stats().free == 0);
  Draft draft;
  EXPECT_STATUS(Status::full, f.store->reserve(kCapacityMin / 2, Wait{}, draft));
  EXPECT_STATUS(Status::too_large, f.store->reserve(2 * kCapacityMin, Wait{}, draft));
}

void a_stale_ref_is_an_error_and_never_other_bytes() {
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

void forged_and_foreign_refs_are_told_apart() {
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

void a_view_keeps_bytes_after_the_end_and_only_then_they_return() {
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

void an_unattached_object_lives_as_long_as_any_process_holds_it() {
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

void holds_are_counted_in_each_process() {
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

void a_discarded_draft_leaves_nothing() {
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

void the_second_result_needs_no_seal_of_the_first() {  // ray#15750
  Fixture f;
  Draft a, b;
  OK(f.store->reserve(400000, Wait{}, a));
  OK(f.store->reserve(400000, Wait{}, b));
  Hold hold;
  OK(f.store->seal(b, &hold));
  OK(f.store->seal(a, &hold));
}

void freeing_a_draft_tells_its_builder() {
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

void a_seal_can_hand_its_pin_on() {
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

void a_get_waits_for_the_seal_of_another_process() {
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

void a_get_ends_when_the_builder_dies() {  // v6d#2072
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

void a_waiter_killed_inside_get_harms_nobody() {  // ray#201
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

void waits_can_be_interrupted() {
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

void a_signal_handler_may_close_the_store_that_waits() {
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

void a_draft_of_an_earlier_opening_cannot_be_sealed() {
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

// -- full ----------------------------------------------------------------------

void a_reservation_waits_for_space_and_gets_it() {
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

void space_goes_to_waiters_in_the_order_they_came() {
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
  // A newcomer that would fit may not overtake.
  Draft small_one;
  EXPECT_STATUS(Status::full, f.store->reserve(100, Wait{}, small_one));
  big.reset();
  for (int i = 0; i < 4; ++i) EXPECT(done.receive<int>() == i);
  for (pid_t child : children) EXPECT(exited_well(wait_for(child)));
  OK(f.store->reserve(100, Wait{}, small_one));
}

void a_dead_waiter_does_not_block_the_queue() {
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

void full_says_who_holds_the_rest() {
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

void freed_neighbours_merge_so_that_free_bytes_are_usable() {  // ray#16164
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

void a_failed_reservation_counts_nowhere() {  // v6d#862
  Fixture f;
  Hold big = put(*f.store, kCapacityMin - 100000, 1);
  Stats const before = f.stats();
  Draft draft;
  for (int i = 0; i < 100; ++i)
    EXPECT_STATUS(Status::full, f.store->reserve(500000, Wait{}, draft));
  EXPECT(f.stats().used == before.used && f.stats().objects == before.objects);
}

void the_object_table_has_a_limit_that_is_named() {
  Options o = small();
  o.max_objects = 16;
  Fixture f(o);
  std::vector<Hold> holds;
  for (int i = 0; i < 16; ++i) holds.push_back(put(*f.store, 64, i));
  Draft draft;
  EXPECT_STATUS(Status::objects_full, f.store->reserve(64, Wait{}, draft));
  EXPECT(Store::detail().find("max_objects") != std::string::npos);
  holds.pop_back();
  OK(f.store->reserve(64, Wait{}, draft));
}

// -- sessions ------------------------------------------------------------------

std::vector<std::string> release(Store& store, Ids ids, std::string_view owner, bool strict = false,
                                 Status expected = Status::ok) {
  std::vector<std::string> released;
  std::vector<Refusal> refused;
  EXPECT_STATUS(expected, store.release(ids, owner, strict, released, refused));
  return released;
}

std::vector<std::string> transfer(Store& store, Ids ids, std::string_view from, std::string_view to,
                                  bool strict = true, Status expected = Status::ok) {
  std::vector<std::string> moved;
  std::vector<Refusal> refused;
  EXPECT_STATUS(expected, store.transfer(ids, from, to, strict, moved, refused));
  return moved;
}

std::string owner_of(Store& store, std::string_view id) {
  std::string owner;
  OK(store.owner(id, owner));
  return owner;
}

using Names = std::vector<std::string>;

void L01_transfer_moves_all_or_says_which_did_not() {
  Fixture f;
  OK(f.store->open("a", "p"));
  OK(f.store->open("b", "p"));
  OK(f.store->open("x", "q"));
  EXPECT(transfer(*f.store, {"a", "x"}, "p", "r", true, Status::not_owner).empty());
  EXPECT(owner_of(*f.store, "a") == "p");
  EXPECT(transfer(*f.store, {"a", "none"}, "p", "r", true, Status::session_released).empty());
  EXPECT(owner_of(*f.store, "a") == "p");
  std::vector<std::string> moved;
  std::vector<Refusal> refused;
  Ids const ids = {"b", "x", "a", "b", "none"};
  OK(f.store->transfer(ids, "p", "r", false, moved, refused));
  EXPECT((moved == Names{"b", "a"}));
  EXPECT(refused.size() == 2 && refused[0].id == "x" && refused[0].holder == "q" &&
         refused[1].why == Status::session_released);
  EXPECT(owner_of(*f.store, "a") == "r" && owner_of(*f.store, "x") == "q");
}

void L02_an_attached_object_lives_exactly_as_long_as_a_session_holds_it() {
  Fixture f;
  OK(f.store->open("a", "p"));
  OK(f.store->open("b", "p"));
  Hold hold = put(*f.store, 100, 1);
  Ref const ref = hold.ref();
  std::uint32_t position = 9;
  OK(f.store->attach_object("a", ref, -1, position));
  EXPECT(position == 0);
  OK(f.store->attach_object("b", ref, -1, position));
  hold.reset();
  EXPECT_STATUS(Status::ok, f.store->probe(ref));
  OK(f.store->hold(ref, hold));  // a reference is only a name now
  EXPECT((release(*f.store, {"a"}, "p") == Names{"a"}));
  EXPECT_STATUS(Status::ok, f.store->probe(ref));
  std::uint64_t ended = 0;
  OK(f.store->free({&ref, 1}, false, ended));
  EXPECT(ended == 0);
  EXPECT_STATUS(Status::not_owner, f.store->free({&ref, 1}, true, ended));
  EXPECT((release(*f.store, {"b"}, "p") == Names{"b"}));
  EXPECT_STATUS(Status::freed, f.store->probe(ref));
  hold.reset();
  EXPECT(f.stats().used == 0);
}

void L03_release_returns_what_it_released_in_order_each_once() {
  Fixture f;
  for (const char* id : {"a", "b", "c"}) OK(f.store->open(id, "p"));
  EXPECT((release(*f.store, {"c", "none", "a", "c", "a"}, "p") == Names{"c", "a"}));
  EXPECT((release(*f.store, {"c", "b"}, "p") == Names{"b"}));
  EXPECT(release(*f.store, {"a", "b", "c"}, "p", true).empty());  // unknown is no error
}

void L03_two_releasers_get_each_id_once() {
  Fixture f;
  std::vector<std::string> names;
  for (int i = 0; i < 200; ++i) names.push_back("s" + std::to_string(i));
  for (const std::string& id : names) OK(f.store->open(id, "p"));
  Pipe results;
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i)
    children.push_back(start([&] {
      auto store = attach(f.name);
      std::uint64_t mine = 0;
      for (std::size_t k = 0; k < names.size(); k += 10) {
        Ids const ids(names.begin() + static_cast<long>(k),
                      names.begin() + static_cast<long>(k) + 10);
        mine += release(*store, ids, "p").size();
      }
      results.send(mine);
      store->close();
    }));
  std::uint64_t total = 0;
  for (pid_t child : children) EXPECT(exited_well(wait_for(child)));
  for (int i = 0; i < 3; ++i) total += results.receive<std::uint64_t>();
  EXPECT(total == names.size());
}

void L04_releasing_what_someone_else_owns_is_refused() {
  Fixture f;
  OK(f.store->open("mine", "learner"));
  OK(f.store->open("theirs", "producer"));
  EXPECT((release(*f.store, {"theirs", "mine"}, "learner", true, Status::not_owner).empty()));
  EXPECT(owner_of(*f.store, "mine") == "learner");
  EXPECT((release(*f.store, {"theirs", "mine"}, "learner") == Names{"mine"}));
  EXPECT(owner_of(*f.store, "theirs") == "producer");
  EXPECT((release(*f.store, {"theirs"}, "*") == Names{"theirs"}));
}

void a_released_session_is_never_resurrected() {
  Fixture f;
  OK(f.store->open("s", "p"));
  Draft late;
  OK(f.store->reserve(100, "s", Wait{}, late));
  Hold loose = put(*f.store, 100, 1);
  release(*f.store, {"s"}, "p");
  std::uint32_t position = 0;
  EXPECT_STATUS(Status::session_released, f.store->attach_object("s", loose.ref(), -1, position));
  EXPECT_STATUS(Status::session_released, f.store->seal(late, nullptr));
  EXPECT(late);
  OK(f.store->open("s", "p"));  // the id anew is another session
  EXPECT_STATUS(Status::session_released, f.store->seal(late, nullptr));
  std::vector<Entry> entries;
  OK(f.store->objects("s", entries));
  EXPECT(entries.empty());
}

void a_session_lists_its_objects_in_order_with_parents() {
  Fixture f;
  OK(f.store->open("s", "p"));
  for (int i = 0; i < 5; ++i)
    put(*f.store, 64 * static_cast<std::uint64_t>(i + 1), i, "s", i - 1).reset();
  Draft draft;
  OK(f.store->reserve(64, "s", Wait{}, draft));
  EXPECT_STATUS(Status::bad_position, f.store->seal(draft, nullptr, 5));
  draft.reset();
  std::vector<Entry> entries;
  OK(f.store->objects("s", entries));
  EXPECT(entries.size() == 5);
  for (int i = 0; i < 5; ++i) {
    auto const& entry = entries[static_cast<std::size_t>(i)];
    EXPECT(entry.parent == i - 1 && entry.size_bytes == 64 * static_cast<std::uint64_t>(i + 1));
  }
  std::uint64_t let_go = 0;
  OK(f.store->truncate("s", 2, let_go));
  EXPECT(let_go == 3);
  OK(f.store->truncate("s", 7, let_go));
  EXPECT(let_go == 0);
  EXPECT_STATUS(Status::bad_position, f.store->truncate("s", -1, let_go));
  EXPECT_STATUS(Status::freed, f.store->probe(entries[2].ref));
  put(*f.store, 64, 9, "s", 1).reset();
  OK(f.store->objects("s", entries));
  EXPECT(entries.size() == 3 && entries[2].parent == 1);
}

void names_are_checked() {
  Fixture f;
  std::string const longest(63, 'x'), longer(64, 'x');
  OK(f.store->open(longest, "p"));
  for (std::string_view bad :
       {std::string_view(""), std::string_view(longer), std::string_view("a\0b", 3),
        std::string_view("\xff"), std::string_view("\xc0\x80"), std::string_view("\xed\xa0\x80"),
        std::string_view("\xe2\x82")}) {
    EXPECT_STATUS(Status::bad_id, f.store->open(bad, "p"));
    EXPECT_STATUS(Status::bad_id, f.store->open("ok", bad));
  }
  OK(f.store->open("Grüße-世界-😀", "π"));
  EXPECT(owner_of(*f.store, "Grüße-世界-😀") == "π");
  EXPECT_STATUS(Status::bad_id, f.store->open("s", "*"));
  EXPECT_STATUS(Status::session_exists, f.store->open(longest, "q"));
}

void unused_owners_make_room_for_new_ones() {
  Fixture f;  // 16 owners
  for (int i = 0; i < 100; ++i) {
    std::string const owner = "o" + std::to_string(i);
    OK(f.store->open("s", owner));
    EXPECT((release(*f.store, {"s"}, owner) == Names{"s"}));
  }
  for (int i = 0; i < 16; ++i) OK(f.store->open("t" + std::to_string(i), "k" + std::to_string(i)));
  EXPECT_STATUS(Status::owners_full, f.store->open("more", "one too many"));
  EXPECT_STATUS(Status::owners_full, f.store->bind("one too many", ""));
}

void sessions_and_attachments_have_limits() {
  Options o = small();
  o.max_sessions = 16;
  o.max_attachments = 16;
  Fixture f(o);
  for (int i = 0; i < 16; ++i) OK(f.store->open("s" + std::to_string(i), "p"));
  EXPECT_STATUS(Status::sessions_full, f.store->open("more", "p"));
  for (int i = 0; i < 16; ++i) put(*f.store, 64, i, "s0").reset();
  Draft draft;
  OK(f.store->reserve(64, "s1", Wait{}, draft));
  EXPECT_STATUS(Status::attachments_full, f.store->seal(draft, nullptr));
  release(*f.store, {"s0"}, "p");
  OK(f.store->seal(draft, nullptr));
}

// -- deaths --------------------------------------------------------------------

void sessions_of_the_dead_fall_to_their_heir_or_are_released() {  // L07, L12
  Fixture f;
  EXPECT(was_killed(wait_for(start([&] {
    auto store = attach(f.name);
    OK(store->bind("learner", "replay"));
    OK(store->bind("producer", ""));
    for (const char* id : {"l1", "l2"}) OK(store->open(id, "learner"));
    OK(store->open("p1", "producer"));
    OK(store->open("free", "nobody bound"));
    put(*store, 100, 1, "l1").reset();
    put(*store, 100, 2, "p1").reset();
    die();
  }))));
  EXPECT(owner_of(*f.store, "l1") == "replay" && owner_of(*f.store, "l2") == "replay");
  bool there = true;
  OK(f.store->contains("p1", there));
  EXPECT(!there);
  EXPECT(owner_of(*f.store, "free") == "nobody bound");
  EXPECT(f.stats().objects == 1);
}

void an_owner_lives_while_one_of_its_processes_does() {
  Fixture f;
  OK(f.store->bind("team", "heir"));
  OK(f.store->open("s", "team"));
  EXPECT(was_killed(wait_for(start([&] {
    auto store = attach(f.name);
    OK(store->bind("team", "heir"));
    die();
  }))));
  EXPECT(owner_of(*f.store, "s") == "team");
  OK(f.store->unbind("team"));
  EXPECT(owner_of(*f.store, "s") == "heir");
}

void heirs_that_died_too_pass_it_on() {
  Fixture f;
  EXPECT(was_killed(wait_for(start([&] {
    auto store = attach(f.name);
    OK(store->bind("c", "d"));
    OK(store->bind("b", "c"));
    OK(store->bind("a", "b"));
    OK(store->open("s", "a"));
    OK(store->bind("x", "y"));
    OK(store->bind("y", "x"));
    OK(store->open("circle", "x"));
    die();
  }))));
  EXPECT(owner_of(*f.store, "s") == "d");
  bool there = true;
  OK(f.store->contains("circle", there));
  EXPECT(!there);
}

void a_clean_close_is_a_death_without_repair() {
  Fixture f;
  EXPECT(exited_well(wait_for(start([&] {
    auto store = attach(f.name);
    OK(store->bind("w", "heir"));
    OK(store->open("s", "w"));
    static Hold kept = put(*store, 100, 1);  // outlives the close
    store->close();
  }))));
  EXPECT(owner_of(*f.store, "s") == "heir");
  Stats const stats = f.stats();
  EXPECT(stats.objects == 0 && stats.clients == 1 && stats.counters.sweeps == 0);
}

void bytes_of_the_dead_come_back_when_they_are_needed() {
  Options o = small(64u << 20);
  o.max_objects = 20000;
  Fixture f(o);
  EXPECT(was_killed(wait_for(start([&] {
    auto store = attach(f.name);
    std::vector<Hold> holds;
    for (int i = 0; i < 10000; ++i) holds.push_back(put(*store, 4096, i & 255));
    die();
  }))));
  Draft draft;
  OK(f.store->reserve(60u << 20, Wait{}, draft));
  EXPECT(f.stats().counters.reclaimed == 10000);
}

void a_stopped_process_is_alive() {
  Fixture f;
  Pipe refs;
  pid_t const child = start([&] {
    auto store = attach(f.name);
    static Hold hold = put(*store, 100, 1);
    refs.send(hold.ref());
    ::kill(::getpid(), SIGSTOP);
    ::pause();
  });
  Ref const ref = refs.receive<Ref>();
  int status = 0;
  EXPECT(::waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
  SweepReport report;
  OK(f.store->sweep(report));
  EXPECT(report.clients == 0);
  EXPECT_STATUS(Status::ok, pin_status(*f.store, ref));
  ::kill(child, SIGKILL);
  EXPECT(was_killed(wait_for(child)));
  OK(f.store->sweep(report));
  EXPECT(report.clients == 1 && report.objects == 1 && report.bytes > 0);
}

void a_fork_child_must_attach_anew_and_the_parent_is_unharmed() {
  Fixture f;
  Hold hold = put(*f.store, 100, 7);
  Pin pin;
  OK(f.store->pin(hold.ref(), Wait{}, pin));
  Draft draft;
  OK(f.store->reserve(100, Wait{}, draft));
  EXPECT(exited_well(wait_for(start([&] {
    Pin mine;
    EXPECT_STATUS(Status::forked, f.store->pin(hold.ref(), Wait{}, mine));
    EXPECT_STATUS(Status::forked, f.store->open("s", "p"));
    EXPECT(!f.store->is_open());
    EXPECT(holds_only(pin, 7));
    auto store = attach(f.name);
    OK(store->pin(hold.ref(), Wait{}, mine));
    EXPECT(store->client_slot() != f.store->client_slot());
    // Destroying what was inherited must not touch the parent's counts.
    pin.reset();
    hold.reset();
    draft.reset();
    f.store->close();
    store->close();
  }))));
  EXPECT_STATUS(Status::ok, f.store->probe(hold.ref()));
  EXPECT(holds_only(pin, 7));
  Hold sealed;
  OK(f.store->seal(draft, &sealed));
  EXPECT(f.stats().clients == 1);
  // The child's exit did not drop our kernel lock: to another process we are alive.
  EXPECT(exited_well(wait_for(start([&] {
    auto store = attach(f.name);
    SweepReport report;
    OK(store->sweep(report));
    EXPECT(report.clients == 0);
    store->close();
  }))));
}

void views_outlive_the_closed_store() {
  Fixture f;
  Hold hold = put(*f.store, 40000, 3);
  Pin pin;
  OK(f.store->pin(hold.ref(), Wait{}, pin));
  f.store->close();
  EXPECT(holds_only(pin, 3));
  EXPECT_STATUS(Status::closed, pin_status(*f.store, hold.ref()));
  // Still a client, so nobody may take the bytes.
  EXPECT(exited_well(wait_for(start([&] {
    auto store = attach(f.name);
    Stats stats;
    OK(store->stats(stats));
    EXPECT(stats.clients == 2 && stats.deferred_bytes > 0);
    store->close();
  }))));
  f.store.reset();
  EXPECT(holds_only(pin, 3));
  pin.reset();
  auto store = attach(f.name);
  Stats stats;
  OK(store->stats(stats));
  EXPECT(stats.clients == 1 && stats.used == 0);
  EXPECT_SOUND(*store);
  hold.reset();  // of the first opening: nothing to the second
  store.reset();
  OK(Store::unlink(f.name));
}

void a_hold_of_an_earlier_opening_does_not_count_in_the_next() {
  Fixture f;
  Pin keeps_joined;
  OK(f.store->open("s", "p"));
  Hold old = put(*f.store, 100, 1);
  Hold other = put(*f.store, 100, 2);
  OK(f.store->pin(other.ref(), Wait{}, keeps_joined));
  auto second = attach(f.name);
  f.store->close();
  second->close();
  second = attach(f.name);
  EXPECT_STATUS(Status::freed, second->probe(old.ref()));
  Hold fresh = put(*second, 100, 3);
  old.reset();
  other.reset();
  EXPECT_STATUS(Status::ok, second->probe(fresh.ref()));
  keeps_joined.reset();
  EXPECT_STATUS(Status::ok, second->probe(fresh.ref()));
  EXPECT_SOUND(*second);
}

void two_stores_of_one_process_share_one_client() {
  Fixture f;
  auto second = attach(f.name);
  EXPECT(second->client_slot() == f.store->client_slot());
  Hold hold = put(*second, 100, 1);
  second->close();
  EXPECT_STATUS(Status::ok, f.store->probe(hold.ref()));
  EXPECT_STATUS(Status::closed, second->probe(hold.ref()));
  Fixture g;  // and two arenas are two
  Hold elsewhere = put(*g.store, 100, 2);
  EXPECT_STATUS(Status::foreign_ref, pin_status(*f.store, elsewhere.ref()));
}

void an_abandoned_client_is_dead_to_the_others() {
  Fixture f;
  Hold hold = put(*f.store, 100, 1);
  Pin pin;
  OK(f.store->pin(hold.ref(), Wait{}, pin));
  f.store->abandon();
  EXPECT_STATUS(Status::closed, f.store->probe(hold.ref()));
  auto again = attach(f.name);
  Stats stats;
  OK(again->stats(stats));
  EXPECT(stats.clients == 1 && stats.objects == 0);
  EXPECT_SOUND(*again);
}

void client_255_joins_and_the_next_is_told_why_not() {
  Fixture f;
  Pipe joined, go;
  std::vector<pid_t> children;
  for (std::uint32_t i = 1; i < kClientsMax; ++i)
    children.push_back(start([&] {
      auto store = attach(f.name);
      joined.send(store->client_slot());
      go.receive<int>();
      die();
    }));
  std::set<std::uint32_t> slots{f.store->client_slot()};
  for (std::size_t i = 0; i < children.size(); ++i) slots.insert(joined.receive<std::uint32_t>());
  EXPECT(slots.size() == kClientsMax);
  EXPECT(exited_well(wait_for(start([&] {
    std::unique_ptr<Store> store;
    EXPECT_STATUS(Status::clients_full, Store::attach(f.name, {}, store));
  }))));
  EXPECT(f.stats().clients == kClientsMax);
  for (std::size_t i = 0; i < children.size(); ++i) go.send(1);
  for (pid_t child : children) EXPECT(was_killed(wait_for(child)));
  EXPECT(exited_well(wait_for(start([&] { attach(f.name)->close(); }))));
  EXPECT(f.stats().clients == 1);
}

// -- names ---------------------------------------------------------------------

void names_of_arenas_are_checked() {
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

void a_name_in_use_is_refused_and_debris_is_replaced() {  // iceoryx#653
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

void a_late_unlink_spares_the_successor() {  // vllm#57422
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
  go.send(1);
  EXPECT(exited_well(wait_for(child)));
}

void an_unlinked_arena_goes_on_for_its_clients() {  // cpython#82300
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

void racing_creators_have_one_winner() {
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

void list_shows_the_living_and_the_debris_and_disturbs_nobody() {
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
  std::vector<ArenaInfo> const all = Store::list();
  EXPECT(find(all, name) != nullptr && find(all, name)->live_clients == 0);
  EXPECT(find(all, f.name) != nullptr && find(all, f.name)->live_clients == 1);
  // Looking did not drop our own locks.
  EXPECT(exited_well(wait_for(start([&] {
    for (const ArenaInfo& info : Store::list())
      if (info.name == f.name) EXPECT(info.live_clients == 1);
  }))));
  OK(Store::unlink(name));
}

void a_process_stopped_while_it_joins_is_named_and_listing_goes_on() {
  char folder[] = "/dev/shm/rules-stopped-XXXXXX";
  EXPECT(::mkdtemp(folder) != nullptr);
  Options options = small();
  options.directory = folder;
  options.lock_limit_ns = 50'000'000;
  auto store = create("there", options);
  pid_t const child = start([&] {
    DirectoryLock const names(folder);
    ::kill(::getpid(), SIGSTOP);
  });
  int status = 0;
  EXPECT(::waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
  std::unique_ptr<Store> another;
  EXPECT_STATUS(Status::stuck, Store::create("new", options, another));
  EXPECT(Store::detail().find("process " + std::to_string(child) + " ") != std::string::npos);
  EXPECT(Store::list(folder).size() == 1);
  put(*store, 100, 1).reset();  // who is attached notices nothing
  ::kill(child, SIGCONT);
  EXPECT(exited_well(wait_for(child)));
  OK(Store::create("new", options, another));
  another.reset();
  store.reset();
  OK(Store::unlink("new", folder));
  OK(Store::unlink("there", folder));
  EXPECT(::rmdir(folder) == 0);
}

void damaged_files_are_refused() {
  // In a folder of its own, so that removing debris removes nobody else's.
  char folder[] = "/dev/shm/rules-damaged-XXXXXX";
  EXPECT(::mkdtemp(folder) != nullptr);
  Options options = small();
  options.directory = folder;
  AttachOptions const there{.directory = folder};
  std::string const name = "damaged";
  EXPECT(was_killed(wait_for(start([&] {
    auto store = create(name, options);
    die();
  }))));
  std::vector<ArenaInfo> const all = Store::list(folder);
  EXPECT(all.size() == 1 && all[0].name == name);
  std::string const path = all[0].path;
  auto patch = [&](off_t at, std::uint64_t value) {
    int const fd = ::open(path.c_str(), O_RDWR);
    std::uint64_t old = 0;
    EXPECT(::pread(fd, &old, sizeof old, at) == sizeof old);
    EXPECT(::pwrite(fd, &value, sizeof value, at) == sizeof value);
    ::close(fd);
    return old;
  };
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
  std::vector<ArenaInfo> const removed = Store::remove_debris(folder);
  EXPECT(removed.size() == 1 && removed[0].name == name && removed[0].status == Status::corrupt);
  EXPECT(::rmdir(folder) == 0);
}

// ray#14182, pytorch#5247: somebody else fills the file system. Needs a tmpfs of its own, which
// root or an unprivileged user namespace may mount.
void a_full_file_system_is_an_error_and_no_signal() {
  char folder[] = "/tmp/shmrl-nospace-XXXXXX";
  EXPECT(::mkdtemp(folder) != nullptr);
  pid_t const child = start([&] {
    if ((::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder, "tmpfs", 0, "size=64m") != 0) {
      std::printf("  not run: this user may not mount a tmpfs\n");
      return;
    }
    Options o = small(128u << 20);
    o.directory = folder;
    std::unique_ptr<Store> store;
    EXPECT_STATUS(Status::no_memory,
                  Store::create("big", o, store));  // larger than the file system
    EXPECT(Store::detail().find("shm-size") != std::string::npos);
    o.capacity = 60u << 20;
    OK(Store::create("fits", o, store));
    std::string const other = std::string(folder) + "/other";
    int const fd = ::open(other.c_str(), O_RDWR | O_CREAT, 0600);
    EXPECT(fd >= 0 && ::posix_fallocate(fd, 0, 40 << 20) == 0);
    Draft draft;
    EXPECT_STATUS(Status::no_memory, store->reserve(50u << 20, Wait{-1}, draft));
    put(*store, 1000, 1).reset();  // and the store goes on
    EXPECT_SOUND(*store);
    EXPECT(::ftruncate(fd, 0) == 0);
    OK(store->reserve(50u << 20, Wait{}, draft));
    std::memset(draft.data(), 1, draft.size());
  });
  EXPECT(exited_well(wait_for(child)));
  EXPECT(::rmdir(folder) == 0);
}

void readers_cannot_write() {
  Fixture f;
  Hold hold = put(*f.store, 100, 1);
  int const status = wait_for(start([&] {
    ::signal(SIGSEGV, SIG_DFL);
    struct rlimit none{};
    ::setrlimit(RLIMIT_CORE, &none);
    auto store = attach(f.name);
    Pin pin;
    OK(store->pin(hold.ref(), Wait{}, pin));
    *const_cast<std::byte*>(pin.data()) = std::byte{9};
  }));
  EXPECT(!exited_well(status));
  Pin pin;
  OK(f.store->pin(hold.ref(), Wait{}, pin));
  EXPECT(holds_only(pin, 1));
}

void copies_arrive_whole() {
  for (std::size_t size : {0ul, 1ul, 4095ul, 100000ul, (9ul << 20) + 13, (33ul << 20) + 7}) {
    std::vector<unsigned char> from(size + 64), to(size + 64, 0xEE);
    for (std::size_t i = 0; i < size; ++i)
      from[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
    for (std::size_t shift : {0ul, 3ul})
      for (unsigned threads : {1u, 2u, 0u}) {
        std::fill(to.begin(), to.end(), static_cast<unsigned char>(0xEE));
        copy_in(to.data() + shift, from.data(), size, threads);
        EXPECT(std::memcmp(to.data() + shift, from.data(), size) == 0);
        EXPECT(to[size + shift] == 0xEE);
      }
  }
  // A fork child has no pool threads and makes its own.
  EXPECT(exited_well(wait_for(start([] {
    std::vector<unsigned char> from(20u << 20, 5), to(20u << 20);
    copy_in(to.data(), from.data(), from.size(), 2);
    EXPECT(from == to);
  }))));
}

void tables_cost_at_most_128_bytes_per_object() {
  Options o = small(512u << 20);
  o.max_objects = 300000;
  Fixture f(o);
  OK(f.store->open("s", "p"));
  struct stat before{}, after{};
  EXPECT(::stat(f.store->path().c_str(), &before) == 0);
  std::uint64_t const committed = f.stats().committed;
  for (int i = 0; i < 200000; ++i) put(*f.store, 64, 1, "s").reset();
  EXPECT(::stat(f.store->path().c_str(), &after) == 0);
  auto const tables = static_cast<std::uint64_t>(after.st_blocks - before.st_blocks) * 512 -
                      (f.stats().committed - committed) * (4096 + 24) / 4096;
  EXPECT(tables <= 200000ull * 128 + (1u << 20));
}

struct Test {
  const char* name;
  void (*run)();
};

#define T(name) {#name, name}
constexpr Test kTests[] = {
    T(an_object_reads_back_what_was_written),
    T(objects_of_all_sizes_do_not_overlap),
    T(an_object_may_fill_the_whole_arena),
    T(a_stale_ref_is_an_error_and_never_other_bytes),
    T(forged_and_foreign_refs_are_told_apart),
    T(a_view_keeps_bytes_after_the_end_and_only_then_they_return),
    T(an_unattached_object_lives_as_long_as_any_process_holds_it),
    T(holds_are_counted_in_each_process),
    T(a_discarded_draft_leaves_nothing),
    T(the_second_result_needs_no_seal_of_the_first),
    T(freeing_a_draft_tells_its_builder),
    T(a_seal_can_hand_its_pin_on),
    T(a_get_waits_for_the_seal_of_another_process),
    T(a_get_ends_when_the_builder_dies),
    T(a_waiter_killed_inside_get_harms_nobody),
    T(waits_can_be_interrupted),
    T(a_signal_handler_may_close_the_store_that_waits),
    T(a_draft_of_an_earlier_opening_cannot_be_sealed),
    T(a_reservation_waits_for_space_and_gets_it),
    T(space_goes_to_waiters_in_the_order_they_came),
    T(a_dead_waiter_does_not_block_the_queue),
    T(full_says_who_holds_the_rest),
    T(freed_neighbours_merge_so_that_free_bytes_are_usable),
    T(a_failed_reservation_counts_nowhere),
    T(the_object_table_has_a_limit_that_is_named),
    T(L01_transfer_moves_all_or_says_which_did_not),
    T(L02_an_attached_object_lives_exactly_as_long_as_a_session_holds_it),
    T(L03_release_returns_what_it_released_in_order_each_once),
    T(L03_two_releasers_get_each_id_once),
    T(L04_releasing_what_someone_else_owns_is_refused),
    T(a_released_session_is_never_resurrected),
    T(a_session_lists_its_objects_in_order_with_parents),
    T(names_are_checked),
    T(unused_owners_make_room_for_new_ones),
    T(sessions_and_attachments_have_limits),
    T(sessions_of_the_dead_fall_to_their_heir_or_are_released),
    T(an_owner_lives_while_one_of_its_processes_does),
    T(heirs_that_died_too_pass_it_on),
    T(a_clean_close_is_a_death_without_repair),
    T(bytes_of_the_dead_come_back_when_they_are_needed),
    T(a_stopped_process_is_alive),
    T(a_fork_child_must_attach_anew_and_the_parent_is_unharmed),
    T(views_outlive_the_closed_store),
    T(a_hold_of_an_earlier_opening_does_not_count_in_the_next),
    T(two_stores_of_one_process_share_one_client),
    T(an_abandoned_client_is_dead_to_the_others),
    T(client_255_joins_and_the_next_is_told_why_not),
    T(names_of_arenas_are_checked),
    T(a_name_in_use_is_refused_and_debris_is_replaced),
    T(a_late_unlink_spares_the_successor),
    T(an_unlinked_arena_goes_on_for_its_clients),
    T(racing_creators_have_one_winner),
    T(list_shows_the_living_and_the_debris_and_disturbs_nobody),
    T(a_process_stopped_while_it_joins_is_named_and_listing_goes_on),
    T(damaged_files_are_refused),
    T(a_full_file_system_is_an_error_and_no_signal),
    T(readers_cannot_write),
    T(copies_arrive_whole),
    T(tables_cost_at_most_128_bytes_per_object),
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--list") {
    for (const Test& test : kTests) std::printf("%s\n", test.name);
    return 0;
  }
  int run = 0;
  for (const Test& test : kTests) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::string(argv[i]) == test.name;
    if (!wanted) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++run;
  }
  std::printf("%d tests passed\n", run);
  return run > 0 ? 0 : 2;
}
