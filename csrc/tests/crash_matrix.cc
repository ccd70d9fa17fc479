// Kills every mutating operation after every one of its stores, and every repair after every one of
// its stores, and demands the state before or the state after: nothing else.
//
// A keeper process K (this one) creates an arena, fills it and stays alive with views on it. A
// child C attaches and dies at its n-th store. A fresh process attaches, repairs, audits (check()
// == []), and describes what it sees; K then audits and describes too, and looks at the bytes under
// its views. Two reference runs say what may be seen: C killed before the operation, and C killed
// after it.
//
//   crash_matrix [--sample N] [--only name,name] [--list] [--quiet]
//
// Without --sample every store is visited, and every store of the repair after it has its turn.
// With it about N stores per operation. The canary build (SHMRL_CANARY_NO_JOURNAL) must fail.
#include <algorithm>
#include <cinttypes>
#include <map>

#include "crash_point.h"
#include "harness.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

// Of this process alone: `shmrl doctor` beside it audits, and so sweeps, all arenas in /dev/shm.
std::string g_folder;

struct World {
  std::string name;
  std::unique_ptr<Store> store;
  std::vector<Ref> refs;  // everything that setup made, for the description
  std::vector<Hold> holds;
  std::vector<Pin> pins;
  std::vector<Draft> drafts;
  Options options;

  Ref put(std::uint64_t size, int fill, std::string_view session = {}, std::int32_t parent = -1) {
    holds.push_back(shmrl::test::put(*store, size, fill, session, parent));
    refs.push_back(holds.back().ref());
    return refs.back();
  }
  void pin(const Ref& ref) {
    Pin view;
    OK(store->pin(ref, Wait{}, view));
    pins.push_back(std::move(view));
  }
};

std::unique_ptr<Store> join(const World& w) {
  AttachOptions options;
  options.directory = g_folder;
  return attach(w.name, options);
}

struct Scenario {
  std::string name;
  std::function<void(World&)> prepare;  // in C, before the crash points count
  std::function<void(World&)> act;      // in C, killed at its n-th store
  std::uint64_t capacity = kCapacityMin;
};

std::uint32_t checksum(const Pin& pin) {
  std::uint32_t sum = 2166136261u;
  for (std::uint64_t i = 0; i < pin.size(); ++i)
    sum = (sum ^ static_cast<std::uint32_t>(pin.data()[i])) * 16777619u;
  return sum;
}

// Everything that a user can see, in a canonical order.
std::string describe(Store& store, const std::vector<Ref>& refs) {
  std::string text;
  auto line = [&text](const std::string& s) { text += s + "\n"; };
  std::vector<std::string> ids;
  OK(store.list("", ids));
  std::sort(ids.begin(), ids.end());
  for (const std::string& id : ids) {
    std::string owner;
    OK(store.owner(id, owner));
    line("session " + id + " of " + owner);
    std::vector<Entry> entries;
    OK(store.objects(id, entries));
    for (const Entry& entry : entries) {
      Pin view;
      OK(store.pin(entry.ref, Wait{}, view));
      EXPECT(view.size() == entry.size_bytes);
      line("  " + std::to_string(entry.size_bytes) + " bytes " + std::to_string(checksum(view)) +
           " parent " + std::to_string(entry.parent));
    }
  }
  for (const Ref& ref : refs) {
    std::uint64_t size = 0;
    Status const status = store.probe(ref, &size);
    line("object " + std::string(to_string(status)) + " " + std::to_string(size));
    if (status == Status::ok) {
      Pin view;
      OK(store.pin(ref, Wait{}, view));
      line("  " + std::to_string(checksum(view)));
    }
  }
  Stats stats;
  OK(store.stats(stats));
  line("objects " + std::to_string(stats.objects) + " doomed " + std::to_string(stats.doomed) +
       " deferred " + std::to_string(stats.deferred_bytes) + " used " + std::to_string(stats.used) +
       " free " + std::to_string(stats.free) + " sessions " + std::to_string(stats.sessions));
  std::sort(stats.by_owner.begin(), stats.by_owner.end(),
            [](const OwnerUsage& a, const OwnerUsage& b) { return a.owner < b.owner; });
  for (const OwnerUsage& o : stats.by_owner)
    line("owner " + o.owner + " " + std::to_string(o.sessions) + " " + std::to_string(o.objects) +
         " " + std::to_string(o.bytes) + " bound " + std::to_string(o.bound_clients) +
         (o.bound_clients > 0 ? " heir " + o.heir : ""));
  return text;
}

// The arena that every scenario starts from. K holds and views some of it, and acts as "kept".
World make_world(const Scenario& scenario) {
  World w;
  w.name = unique_name("crash");
  w.options.capacity = scenario.capacity;
  w.options.max_objects = 64;
  w.options.max_sessions = 16;
  w.options.max_owners = 16;
  w.options.directory = g_folder;
  w.store = create(w.name, w.options);
  for (const char* id : {"a", "b", "c"}) OK(w.store->open(id, "src"));
  OK(w.store->open("d", "other"));
  OK(w.store->open("e", "kept"));
  OK(w.store->bind("kept", "other"));
  std::uint32_t position = 0;
  Ref const shared = w.put(300, 1);
  OK(w.store->attach_object("a", shared, -1, position));
  OK(w.store->attach_object("b", shared, -1, position));
  w.put(100, 2, "a", 0);
  w.put(5000, 3, "a", 1);
  w.put(40000, 4, "a", 1);
  w.put(64, 5, "b", 0);
  w.put(0, 6, "c");
  w.put(64, 7, "d");
  w.put(700, 8, "e");
  w.pin(w.refs[2]);  // the view outlives a release of "a"
  w.put(200, 9);     // never attached, held by K
  w.put(50000, 10);  // likewise
  w.put(64, 11);
  w.put(64, 12);
  w.pin(w.refs[9]);
  return w;
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  auto none = [](World&) {};
  auto add = [&](std::string name, std::function<void(World&)> prepare,
                 std::function<void(World&)> act, std::uint64_t capacity = kCapacityMin) {
    all.push_back({std::move(name), std::move(prepare), std::move(act), capacity});
  };
  std::vector<std::string> moved;
  add("put_small", none, [](World& w) { w.put(128, 40); });
  add("put_large", none, [](World& w) { w.put(100000, 41); });
  add("put_into_session", none, [](World& w) { w.put(128, 42, "b", 1); });
  add("put_growing", none, [](World& w) { w.put(20u << 20, 43); }, 40u << 20);
  add("build", none, [](World& w) {
    w.drafts.emplace_back();
    OK(w.store->reserve(256, Wait{}, w.drafts.back()));
  });
  add(
      "seal",
      [](World& w) {
        w.drafts.emplace_back();
        OK(w.store->reserve(256, Wait{}, w.drafts.back()));
        std::memset(w.drafts.back().data(), 44, 256);
      },
      [](World& w) {
        Hold hold;
        OK(w.store->seal(w.drafts.back(), &hold));
        hold.reset();
      });
  add(
      "seal_into_session",
      [](World& w) {
        w.drafts.emplace_back();
        OK(w.store->reserve(256, "c", Wait{}, w.drafts.back()));
        std::memset(w.drafts.back().data(), 45, 256);
      },
      [](World& w) { OK(w.store->seal(w.drafts.back(), nullptr, 0)); });
  add(
      "discard",
      [](World& w) {
        w.drafts.emplace_back();
        OK(w.store->reserve(40000, Wait{}, w.drafts.back()));
      },
      [](World& w) { OK(w.store->discard(w.drafts.back())); });
  auto free_refs = [](World& w, std::vector<std::size_t> which) {
    std::vector<Ref> refs;
    for (std::size_t i : which) refs.push_back(w.refs[i]);
    std::uint64_t ended = 0;
    OK(w.store->free(refs, false, ended));
  };
  add("free_one", none, [=](World& w) { free_refs(w, {8}); });
  add("free_viewed", none, [=](World& w) { free_refs(w, {9}); });
  // Many are two: the fewest that need the journal. (release_owned has three.)
  add("free_many", none, [=](World& w) { free_refs(w, {8, 0, 9}); });
  add("hold_and_drop", none, [](World& w) {
    Hold hold;
    OK(w.store->hold(w.refs[8], hold));
  });
  add(
      "last_drop", [](World& w) { w.holds.push_back(put(*w.store, 300, 46)); },
      [](World& w) { w.holds.back().reset(); });
  add("pin_and_unpin", none, [](World& w) {
    Pin pin;
    OK(w.store->pin(w.refs[0], Wait{}, pin));
  });
  add(
      "last_unpin",
      [](World& w) {
        w.holds.push_back(put(*w.store, 300, 47));
        w.pin(w.holds.back().ref());
        w.holds.back().reset();
      },
      [](World& w) { w.pins.back().reset(); });
  add("open", none, [](World& w) { OK(w.store->open("new", "src")); });
  add("open_new_owner", none, [](World& w) { OK(w.store->open("new", "nobody yet")); });
  add("attach", none, [](World& w) {
    std::uint32_t position = 0;
    OK(w.store->attach_object("b", w.refs[8], 1, position));
  });
  add("attach_again", none, [](World& w) {
    std::uint32_t position = 0;
    OK(w.store->attach_object("d", w.refs[0], 0, position));
  });
  add("truncate", none, [](World& w) {
    std::uint64_t let_go = 0;
    OK(w.store->truncate("a", 1, let_go));
  });
  add("truncate_all", none, [](World& w) {
    std::uint64_t let_go = 0;
    OK(w.store->truncate("b", 0, let_go));
  });
  auto transfer = [](World& w, Ids ids) {
    std::vector<std::string> done;
    std::vector<Refusal> refused;
    OK(w.store->transfer(ids, "src", "dst", true, done, refused));
  };
  add("transfer_one", none, [=](World& w) { transfer(w, {"b"}); });
  add("transfer_many", none, [=](World& w) { transfer(w, {"c", "a"}); });
  auto release = [](World& w, Ids ids) {
    std::vector<std::string> done;
    std::vector<Refusal> refused;
    OK(w.store->release(ids, "src", false, done, refused));
  };
  add("release_one", none, [=](World& w) { release(w, {"a"}); });
  add("release_many", none, [=](World& w) { release(w, {"b", "d", "a"}); });
  add("release_owned", none, [](World& w) {
    std::vector<std::string> done;
    OK(w.store->release_owned("src", done));
  });
  add("bind_first", none, [](World& w) { OK(w.store->bind("src", "other")); });
  add("bind_second", none, [](World& w) { OK(w.store->bind("kept", "src")); });
  add(
      "unbind", [](World& w) { OK(w.store->bind("src", "other")); },
      [](World& w) { OK(w.store->unbind("src")); });
  add("join", [](World& w) { w.store->close(); }, [](World& w) { w.store = join(w); });
  add(
      "leave",
      [](World& w) {
        w.put(300, 48);
        w.pin(w.refs[0]);
        w.pins.clear();
        OK(w.store->bind("src", "dst"));
      },
      [](World& w) { w.store->close(); });
  add(
      "leave_under_views",
      [](World& w) {
        w.put(300, 49);
        w.pin(w.refs.back());
      },
      [](World& w) {
        w.store->close();
        w.pins.clear();
      });
  add("queue_for_space", none, [](World& w) {
    Draft draft;
    EXPECT_STATUS(Status::full, w.store->reserve(kCapacityMin, Wait{2'000'000}, draft));
  });
  auto leave_a_corpse = [](World& w) {
    // Another client that dies with holds, views, a draft, a session of its own and an inheritance.
    EXPECT(was_killed(wait_for(start([&] {
      auto store = join(w);
      std::vector<Hold> holds;
      for (int i = 0; i < 5; ++i) holds.push_back(put(*store, 1000, i));
      Pin view, other;
      OK(store->pin(w.refs[0], Wait{}, view));
      OK(store->pin(holds[0].ref(), Wait{}, other));
      Draft draft;
      OK(store->reserve(60000, Wait{}, draft));
      OK(store->bind("src", "heir"));
      OK(store->open("own", "mortal"));
      put(*store, 128, 50, "own").reset();
      OK(store->bind("mortal", ""));
      die();
    }))));
  };
  add("sweep", leave_a_corpse, [](World& w) {
    SweepReport report;
    OK(w.store->sweep(report));
    EXPECT(report.clients == 1);
  });
  return all;
}

enum class Point : std::uint64_t { before = 0, after = UINT64_MAX };

struct Outcome {
  bool killed_inside = false;
  std::uint64_t hits = 0;
  std::string seen;
};

class Matrix {
 public:
  Matrix(std::uint64_t sample, bool quiet) : sample_(sample), quiet_(quiet) {}

  bool run(const Scenario& scenario) {
    current_ = &scenario;
    std::string const before = kill_at(0, true, 0).seen;
    Outcome const whole = kill_at(0, false, 0);
    std::string const& after = whole.seen;
    std::uint64_t const stores = whole.hits;
    std::uint64_t const stride = sample_ == 0 ? 1 : std::max<std::uint64_t>(1, stores / sample_);
    std::uint64_t failures = 0, kills = 0, saw_before = 0, saw_after = 0;
    auto judge = [&](const Outcome& outcome, std::uint64_t n, std::uint64_t m) {
      ++kills;
      if (outcome.seen == before) {
        ++saw_before;
      } else if (outcome.seen == after) {
        ++saw_after;
      } else if (++failures <= 3) {
        std::fprintf(stderr,
                     "%s: killed after store %" PRIu64 ", repair after store %" PRIu64
                     ": neither before nor after.\n--- before\n%s--- after\n%s--- seen\n%s",
                     scenario.name.c_str(), n, m, before.c_str(), after.c_str(),
                     outcome.seen.c_str());
      }
    };
    std::uint64_t repairs = 0;
    for (std::uint64_t n = 1; n <= stores; n += stride) {
      Outcome const outcome = kill_at(n, false, 0);
      if (!outcome.killed_inside) break;
      judge(outcome, n, 0);
      // Kill the repair as well. In full: at every store of it for each tenth n, and for the others
      // at each 17th from a start that moves with n, so that every store has its turn.
      // (Not where each try reserves megabytes.)
      bool const thorough = sample_ == 0 && n % 10 == 1 && scenario.capacity == kCapacityMin;
      if (sample_ != 0 && n / stride % 3 == 2) continue;
      std::uint64_t const step = thorough                                            ? 1
                                 : sample_ == 0 && scenario.capacity == kCapacityMin ? 17
                                                                                     : 97 + n % 31;
      for (std::uint64_t m = thorough ? 1 : 1 + n % step;; m += step) {
        Outcome const twice = kill_at(n, false, m);
        if (twice.hits == 0) break;  // the repair had fewer stores
        judge(twice, n, m);
        ++repairs;
      }
    }
    if (!quiet_ || failures > 0)
      std::printf("%-20s %5" PRIu64 " stores, %6" PRIu64 " kills (%" PRIu64
                  " of repairs): before %" PRIu64 ", after %" PRIu64 ", wrong %" PRIu64 "\n",
                  scenario.name.c_str(), stores, kills, repairs, saw_before, saw_after, failures);
    std::fflush(stdout);
    total_ += kills;
    return failures == 0;
  }

  std::uint64_t total() const { return total_; }

 private:
  // C dies after its n-th store (0: after the act, or before it if `skip`); if m > 0 a first
  // repairer dies after its m-th, and `hits` says whether it did. What a fresh process then sees.
  Outcome kill_at(std::uint64_t n, bool skip, std::uint64_t m) {
    World w = make_world(*current_);
    Outcome outcome;
    Pipe done;
    int const status = wait_for(start([&] {
      // The keeper's handles are dead in here; only its names are of use.
      w.store.release();
      World mine;
      mine.name = w.name;
      mine.refs = w.refs;
      mine.options = w.options;
      mine.store = join(w);
      current_->prepare(mine);
      if (!skip) {
        crash::arm(n);
        current_->act(mine);
      }
      done.send(skip ? std::uint64_t{0} : crash::hits());
      die();
    }));
    EXPECT(was_killed(status));
    done.send(UINT64_MAX);
    std::uint64_t const hits = done.receive<std::uint64_t>();
    outcome.killed_inside = hits == UINT64_MAX;
    outcome.hits = hits;
    if (m > 0) {
      int const repair = wait_for(start([&] {
        crash::arm(m);
        auto store = join(w);
        SweepReport report;
        OK(store->sweep(report));
        crash::arm(0);
      }));
      outcome.hits = was_killed(repair) ? 1 : 0;
      if (!was_killed(repair)) EXPECT(exited_well(repair));
    }
    Pipe seen;
    EXPECT(exited_well(wait_for(start([&] {
      auto store = join(w);
      EXPECT_SOUND(*store);
      seen.send_text(describe(*store, w.refs));
      store->close();
    }))));
    outcome.seen = seen.receive_text();
    // The keeper sees the same, and the bytes under its views are unharmed.
    EXPECT_SOUND(*w.store);
    std::string const mine = describe(*w.store, w.refs);
    if (mine != outcome.seen) {
      std::fprintf(stderr, "the keeper sees\n%sthe fresh process saw\n%s", mine.c_str(),
                   outcome.seen.c_str());
      ::_exit(1);
    }
    EXPECT(holds_only(w.pins[0], 3) && holds_only(w.pins[1], 10));
    w.pins.clear();
    w.holds.clear();
    std::vector<std::string> ids, released;
    std::vector<Refusal> refused;
    OK(w.store->list("", ids));
    OK(w.store->release(Ids(ids.begin(), ids.end()), "*", true, released, refused));
    Stats stats;
    OK(w.store->stats(stats));
    if (stats.used != 0 || stats.objects != 0 || stats.doomed != 0)
      fail_at(__FILE__, __LINE__,
              current_->name + ": " + std::to_string(stats.used) +
                  " bytes leaked after a kill at store " + std::to_string(n));
    OK(Store::unlink(w.name, g_folder));
    return outcome;
  }

  std::uint64_t sample_;
  bool quiet_;
  const Scenario* current_ = nullptr;
  std::uint64_t total_ = 0;
};

// Creation and removal have no arena before or after: the name must work again, with nothing left
// over.
bool crash_create_and_unlink(bool unlink, std::uint64_t sample) {
  std::uint64_t kills = 0;
  for (std::uint64_t n = 1;; n += sample == 0 ? 1 : 7) {
    std::string const name = unique_name("birth");
    Options options;
    options.directory = g_folder;
    options.capacity = kCapacityMin;
    int const status = wait_for(start([&] {
      if (!unlink) crash::arm(n);
      auto store = create(name, options);
      store->close();
      if (unlink) crash::arm(n);
      OK(Store::unlink(name, g_folder));
    }));
    if (!was_killed(status)) {
      EXPECT(exited_well(status));
      break;
    }
    ++kills;
    auto store = create(name, options);
    EXPECT_SOUND(*store);
    put(*store, 1000, 1).reset();
    EXPECT_SOUND(*store);
    store->close();
    OK(Store::unlink(name, g_folder));
    std::vector<ArenaInfo> all;
    OK(Store::list(all, g_folder));
    for (const ArenaInfo& info : all) EXPECT(info.path.find(name) == std::string::npos);
  }
  std::printf("%-20s %6" PRIu64 " kills\n", unlink ? "unlink" : "create", kills);
  return kills > 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t sample = 0;
  bool quiet = false;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    std::string const arg = argv[i];
    if (arg == "--sample" && i + 1 < argc) {
      sample = std::strtoull(argv[++i], nullptr, 10);
    } else if (arg == "--only" && i + 1 < argc) {
      only = "," + std::string(argv[++i]) + ",";
    } else if (arg == "--quiet") {
      quiet = true;
    } else if (arg == "--list") {
      for (const Scenario& s : scenarios()) std::printf("%s\n", s.name.c_str());
      std::printf("create\nunlink\n");
      return 0;
    } else {
      std::fprintf(stderr, "usage: crash_matrix [--sample N] [--only a,b] [--quiet] [--list]\n");
      return 2;
    }
  }
  char folder[] = "/dev/shm/crash-XXXXXX";
  EXPECT(::mkdtemp(folder) != nullptr);
  g_folder = folder;
  Matrix matrix(sample, quiet);
  bool good = true;
  auto wanted = [&only](const std::string& name) {
    return only.empty() || only.find("," + name + ",") != std::string::npos;
  };
  for (const Scenario& scenario : scenarios())
    if (wanted(scenario.name)) good = matrix.run(scenario) && good;
  if (wanted("create")) good = crash_create_and_unlink(false, sample) && good;
  if (wanted("unlink")) good = crash_create_and_unlink(true, sample) && good;
  EXPECT(::rmdir(folder) == 0);  // and so empty
  std::printf("%" PRIu64 " kills, %s\n", matrix.total(), good ? "all sound" : "FAILED");
  return good ? 0 : 1;
}
