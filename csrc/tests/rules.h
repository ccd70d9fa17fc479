// What the rules share: the registry that RULE adds to, and an arena that is gone after each.
#pragma once

#include <string>
#include <vector>

#include "harness.h"

namespace shmrl::test {

struct Rule {
  const char* name;
  void (*run)();
};
std::vector<Rule>& rules();  // rules.cc

struct RuleAdded {
  RuleAdded(const char* name, void (*run)()) { rules().push_back({name, run}); }
};

// A claim about the facade and the function that tests it; `shmrl_rules NAME` runs it.
#define RULE(name)                           \
  void name();                               \
  const RuleAdded added_##name(#name, name); \
  void name()

inline Options small(std::uint64_t capacity = kCapacityMin) {
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

// A folder of its own on shared memory, so that removing debris removes nobody else's.
class Folder {
 public:
  Folder() { EXPECT(::mkdtemp(path_) != nullptr); }
  ~Folder() { EXPECT(::rmdir(path_) == 0); }  // and so empty
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  operator std::string() const { return path_; }
  std::vector<ArenaInfo> list() const {
    std::vector<ArenaInfo> all;
    OK(Store::list(all, path_));
    return all;
  }
  std::vector<ArenaInfo> remove_debris() const {
    std::vector<ArenaInfo> removed;
    OK(Store::remove_debris(removed, path_));
    return removed;
  }

 private:
  char path_[32] = "/dev/shm/rules-XXXXXX";
};

inline Status pin_status(Store& store, const Ref& ref) {
  Pin pin;
  return store.pin(ref, Wait{}, pin);
}

inline std::string owner_of(Store& store, std::string_view id) {
  std::string owner;
  OK(store.owner(id, owner));
  return owner;
}

}  // namespace shmrl::test
