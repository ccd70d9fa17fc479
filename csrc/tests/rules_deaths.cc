// Rules about deaths, stops, forks and closes.

#include <algorithm>
#include <set>

#include "client.h"
#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

RULE(sessions_of_the_dead_fall_to_their_heir_or_are_released) {  // L07, L12
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

RULE(an_owner_lives_while_one_of_its_processes_does) {
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

RULE(heirs_that_died_too_pass_it_on) {
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

RULE(a_clean_close_is_a_death_without_repair) {
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

RULE(bytes_of_the_dead_come_back_when_they_are_needed) {
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

// Words of every kind that layout.h calls derived.
void scribble_over_what_is_derived(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  for (auto* count : {&h.waiters, &h.used_bytes, &h.objects_live, &h.objects_doomed,
                      &h.doomed_bytes, &h.sessions_open, &h.empty_slabs})
    count->set(txn, 77);
  for (auto* head : {&h.free_object, &h.free_attachment, &h.free_session, &h.free_owner})
    head->set(txn, 0);
  for (auto& word : h.bin_mask) word.set(txn, ~0ull);
  for (auto& head : h.bins) head.set(txn, 3);
  for (auto& head : h.slabs) head.set(txn, 3);
  for (std::uint32_t i = 0; i < arena.objects_used(); ++i) arena.object(i).attached.set(txn, 77);
  for (std::uint32_t i = 0; i < arena.attachments_used(); ++i)
    arena.attachment(i).previous.set(txn, 77);
  for (std::uint32_t i = 0; i < arena.sessions_used(); ++i) {
    SessionEntry& s = arena.session(i);
    for (auto* word : {&s.tail, &s.hash, &s.hash_next, &s.owner_previous, &s.owner_next})
      word->set(txn, 77);
    s.bytes.set(txn, 77);
  }
  for (std::uint32_t i = 0; i < arena.session_buckets(); ++i) arena.session_bucket(i).set(txn, 0);
  for (std::uint32_t i = 0; i < arena.owner_buckets(); ++i) arena.owner_bucket(i).set(txn, 0);
  for (std::uint32_t i = 0; i < arena.owners_used(); ++i) {
    OwnerEntry& o = arena.owner(i);
    for (auto* word : {&o.sessions, &o.first, &o.last, &o.hash_next}) word->set(txn, 77);
    for (auto* sum : {&o.objects, &o.bytes}) sum->set(txn, 77);
  }
  for (std::uint64_t i = 0; i < arena.granules_ready(); ++i) arena.granule(i).kind.set(txn, 77);
}

RULE(a_repair_finds_all_that_is_derived_again) {
  Fixture f;
  for (const char* id : {"a", "b", "gone"}) OK(f.store->open(id, "p"));
  OK(f.store->open("c", "q"));
  OK(f.store->bind("q", "heir"));
  std::vector<Hold> holds;
  for (std::uint64_t size :
       {0u, 64u, 300u, 5000u, 33000u, 40000u}) {  // no size is that of its block
    holds.push_back(put(*f.store, size + 1, 1));
    put(*f.store, size + 3, 2, "a").reset();
    put(*f.store, size + 5, 3, "c").reset();
  }
  std::uint32_t position = 0;
  OK(f.store->attach_object("b", holds[3].ref(), -1, position));
  std::vector<std::string> done;
  std::vector<Refusal> refused;
  OK(f.store->release(Ids{"gone"}, "p", true, done, refused));
  std::vector<Pin> pins(2);
  for (std::size_t i : {0, 1}) {
    OK(f.store->pin(holds[4 + i].ref(), Wait{}, pins[i]));  // ended, under a view
    holds[4 + i].reset();
  }
  Draft draft;
  OK(f.store->reserve(700, Wait{}, draft));

  Stats const before = f.stats();
  EXPECT(before.doomed == 2 && before.deferred_bytes > 73000 && before.by_owner.size() == 2);
  die_inside_a_transaction(f.name, scribble_over_what_is_derived);
  EXPECT_SOUND(*f.store);
  Stats const after = f.stats();
  EXPECT(after.counters.recoveries == before.counters.recoveries + 1);
  EXPECT(after.used == before.used && after.free == before.free &&
         after.deferred_bytes == before.deferred_bytes);
  EXPECT(after.objects == before.objects && after.doomed == before.doomed &&
         after.sessions == before.sessions && after.building == before.building);
  for (std::size_t i : {0, 1}) {
    const OwnerUsage &was = before.by_owner[i], &is = after.by_owner[i];
    EXPECT(is.owner == was.owner && is.sessions == was.sessions && is.objects == was.objects &&
           is.bytes == was.bytes && is.heir == was.heir);
  }
}

RULE(a_stopped_process_is_alive) {
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

RULE(a_fork_child_must_attach_anew_and_the_parent_is_unharmed) {
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

RULE(views_outlive_the_closed_store) {
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

RULE(a_hold_of_an_earlier_opening_does_not_count_in_the_next) {
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

RULE(two_stores_of_one_process_share_one_client) {
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

RULE(an_abandoned_client_is_dead_to_the_others) {
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

RULE(client_255_joins_and_the_next_is_told_why_not) {
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

}  // namespace
