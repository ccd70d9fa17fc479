// Workers that do everything at full speed on one arena while a supervisor kills them at random.
//
//   soak [--seconds S] [--workers N] [--seed X]
//
// The supervisor is a client too: it audits (check() == []) while the workers go on, reads every
// object of every session and compares each byte with what its header says, and at the end, when
// all workers are dead, demands an arena that is empty after one release.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <thread>

#include "harness.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

struct Random {
  std::uint64_t state;
  std::uint64_t below(std::uint64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
  }
};

// What an object says about itself; all later bytes are `fill`.
struct Head {
  std::uint64_t generation;
  std::uint64_t size;
  std::uint64_t fill;
};

bool unharmed(const Pin& pin) {
  Head head{};
  if (pin.size() < sizeof head) return false;
  std::memcpy(&head, pin.data(), sizeof head);
  if (head.generation != pin.ref().generation || head.size != pin.size()) return false;
  for (std::uint64_t i = sizeof head; i < pin.size(); i += 61)
    if (pin.data()[i] != static_cast<std::byte>(head.fill)) return false;
  return true;
}

Status put_marked(Store& store, Random& random, std::string_view session, Hold& hold) {
  std::uint64_t const size = sizeof(Head) + random.below(random.below(10) == 0 ? 200000 : 3000);
  Draft draft;
  Wait const wait{5'000'000};
  Status const status = session.empty() ? store.reserve(size, wait, draft)
                                        : store.reserve(size, session, wait, draft);
  if (status != Status::ok) return status;
  Head const head{draft.ref().generation, size, random.below(256)};
  std::memset(draft.data(), static_cast<int>(head.fill), size);
  std::memcpy(draft.data(), &head, sizeof head);
  return store.seal(draft, &hold);
}

bool one_of(Status status, std::initializer_list<Status> allowed) {
  return status == Status::ok || std::find(allowed.begin(), allowed.end(), status) != allowed.end();
}

[[noreturn]] void work(const std::string& name, std::uint64_t number, std::uint64_t seed) {
  auto store = attach(name);
  Random random{seed * 2654435761u + 88172645463325252ull};
  std::string const me = "worker-" + std::to_string(number % 4);
  OK(store->bind(me, number % 2 == 0 ? "sink" : ""));
  std::vector<Hold> holds;
  std::vector<Pin> pins;
  for (;;) {
    std::string const id = "s" + std::to_string(random.below(60));
    Ids const ids = {id, "s1", "s2", "s3"};
    std::vector<std::string> names;
    std::vector<Refusal> refused;
    std::vector<Entry> entries;
    std::uint64_t count = 0;
    std::uint32_t position = 0;
    Status status = Status::ok;
    switch (random.below(12)) {
      case 0:
        status = store->open(id, me);
        break;
      case 1:
      case 2:
      case 3: {
        Hold hold;
        status = put_marked(*store, random, random.below(3) == 0 ? std::string_view() : id, hold);
        if (status == Status::ok && holds.size() < 50) holds.push_back(std::move(hold));
        break;
      }
      case 4:
        status = store->transfer(ids, me, "sink", false, names, refused);
        break;
      case 5:
        status = store->release(ids, random.below(2) == 0 ? me : "sink", false, names, refused);
        break;
      case 6:
        status = store->truncate(id, static_cast<std::int64_t>(random.below(5)), count);
        break;
      case 7: {
        status = store->objects(id, entries);
        for (const Entry& entry : entries) {
          Pin pin;
          Status const pinned = store->pin(entry.ref, Wait{}, pin);
          EXPECT(one_of(pinned, {Status::freed}));
          if (pinned == Status::ok) EXPECT(unharmed(pin));
          if (pinned == Status::ok && pins.size() < 20) pins.push_back(std::move(pin));
        }
        break;
      }
      case 8:
        if (!holds.empty())
          status = store->attach_object(id, holds[random.below(holds.size())].ref(), -1, position);
        break;
      case 9: {
        std::vector<Ref> refs;
        for (const Hold& hold : holds) refs.push_back(hold.ref());
        status = store->free(refs, false, count);
        holds.clear();
        break;
      }
      case 10:
        if (!holds.empty()) holds.erase(holds.begin());
        break;
      default:
        for (const Pin& pin : pins) EXPECT(unharmed(pin));
        pins.clear();
    }
    if (!one_of(status,
                {Status::session_released, Status::session_exists, Status::full, Status::freed,
                 Status::sessions_full, Status::objects_full, Status::attachments_full}))
      fail_at(__FILE__, __LINE__, std::string(to_string(status)) + ": " + Store::detail());
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t seconds = 10, workers = 4, seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string const arg = argv[i];
    std::uint64_t const value = std::strtoull(argv[i + 1], nullptr, 10);
    if (arg == "--seconds") seconds = value;
    if (arg == "--workers") workers = value;
    if (arg == "--seed") seed = value;
  }
  std::printf("seed %" PRIu64 "\n", seed);
  Options o;
  o.capacity = 32u << 20;
  o.max_objects = 8192;
  o.max_sessions = 64;
  std::string const name = unique_name("soak");
  auto store = create(name, o);
  Random random{seed * 0x9E3779B97F4A7C15ull + 1};
  std::vector<pid_t> children(workers, 0);
  std::uint64_t started = 0, kills = 0, audits = 0, objects = 0;
  auto launch = [&](std::size_t i) {
    std::uint64_t const number = started++;
    children[i] = start([&] { work(name, number, seed + number); });
  };
  for (std::size_t i = 0; i < workers; ++i) launch(i);
  auto const end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(200 + random.below(20000)));
    std::size_t const victim = random.below(workers);
    ::kill(children[victim], SIGKILL);
    int const status = wait_for(children[victim]);
    if (!was_killed(status)) {
      std::fprintf(stderr, "a worker ended by itself: status %d\n", status);
      return 1;
    }
    ++kills;
    launch(victim);
    if (kills % 4 != 0) continue;
    EXPECT_SOUND(*store);
    ++audits;
    std::vector<std::string> ids;
    OK(store->list("", ids));
    for (const std::string& id : ids) {
      std::vector<Entry> entries;
      if (store->objects(id, entries) != Status::ok) continue;
      for (const Entry& entry : entries) {
        Pin pin;
        if (store->pin(entry.ref, Wait{}, pin) != Status::ok) continue;
        EXPECT(unharmed(pin));
        ++objects;
      }
    }
  }
  for (pid_t child : children) {
    ::kill(child, SIGKILL);
    wait_for(child);
  }
  EXPECT_SOUND(*store);
  std::vector<std::string> ids, released;
  std::vector<Refusal> refused;
  OK(store->list("", ids));
  OK(store->release(Ids(ids.begin(), ids.end()), "*", true, released, refused));
  Stats stats;
  OK(store->stats(stats));
  EXPECT(stats.clients == 1 && stats.sessions == 0 && stats.objects == 0 && stats.used == 0);
  EXPECT_SOUND(*store);
  std::printf("%" PRIu64 " kills, %" PRIu64 " audits, %" PRIu64 " objects read back, %" PRIu64
              " puts, %" PRIu64 " repairs inside the lock: sound\n",
              kills, audits, objects, stats.counters.puts, stats.counters.recoveries);
  store.reset();
  OK(Store::unlink(name));
  return 0;
}
