// What the core costs without Python, next to the machine's own floors, as one JSON object on stdout.
//
//   bench_core [--quick]
//
// Times are medians over batches, in nanoseconds unless the key says otherwise. Python's bench reads it.
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "harness.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

using Clock = std::chrono::steady_clock;

double now_ns() {
  return static_cast<double>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count());
}

// Median over `batches` of the time of one of `count` calls.
template <class Body>
double median_ns(int batches, int count, Body body) {
  std::vector<double> times;
  for (int b = 0; b < batches; ++b) {
    double const begin = now_ns();
    for (int i = 0; i < count; ++i) body();
    times.push_back((now_ns() - begin) / count);
  }
  std::nth_element(times.begin(), times.begin() + batches / 2, times.end());
  return times[static_cast<std::size_t>(batches / 2)];
}

struct Report {
  std::vector<std::pair<std::string, double>> values;
  void add(const std::string& key, double value) { values.emplace_back(key, value); }
  void print() const {
    std::printf("{");
    for (std::size_t i = 0; i < values.size(); ++i)
      std::printf("%s\n  \"%s\": %.2f", i == 0 ? "" : ",", values[i].first.c_str(), values[i].second);
    std::printf("\n}\n");
  }
};

void floors(Report& report, bool quick) {
  void* const shared =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(shared != MAP_FAILED);
  auto* const word = static_cast<std::atomic<std::uint32_t>*>(shared);
  report.add("floor_atomic_add", median_ns(21, 100000, [&] { word->fetch_add(1); }));
  auto* const mutex = reinterpret_cast<pthread_mutex_t*>(static_cast<char*>(shared) + 256);
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(mutex, &attributes);
  report.add("floor_robust_mutex", median_ns(21, 100000, [&] {
               ::pthread_mutex_lock(mutex);
               ::pthread_mutex_unlock(mutex);
             }));
  report.add("floor_syscall", median_ns(21, 10000, [] { ::syscall(SYS_getppid); }));
  // Two processes, one word: a futex round trip, and a spinning one.
  for (bool spin : {false, true}) {
    word->store(0);
    int const trips = quick ? 2000 : 10000;
    auto wait_until = [&](std::uint32_t value) {
      for (std::uint32_t seen = word->load(); seen != value; seen = word->load())
        if (!spin) ::syscall(SYS_futex, word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    };
    auto set = [&](std::uint32_t value) {
      word->store(value);
      if (!spin) ::syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    };
    pid_t const child = start([&] {
      for (int i = 0; i < trips; ++i) {
        wait_until(static_cast<std::uint32_t>(2 * i + 1));
        set(static_cast<std::uint32_t>(2 * i + 2));
      }
    });
    std::vector<double> times;
    for (int i = 0; i < trips; ++i) {
      double const begin = now_ns();
      set(static_cast<std::uint32_t>(2 * i + 1));
      wait_until(static_cast<std::uint32_t>(2 * i + 2));
      times.push_back(now_ns() - begin);
    }
    EXPECT(exited_well(wait_for(child)));
    std::nth_element(times.begin(), times.begin() + trips / 2, times.end());
    report.add(spin ? "floor_spin_round_trip" : "floor_futex_round_trip",
               times[static_cast<std::size_t>(trips / 2)]);
  }
  ::munmap(shared, 4096);
}

void references(Report& report, Store& store) {
  Hold hold = put(store, 1024, 1);
  Ref const ref = hold.ref();
  report.add("hold_drop_again", median_ns(21, 100000, [&] {
               Hold again;
               OK(store.hold(ref, again));
             }));
  OK(store.open("bench", "bench"));
  std::uint32_t position = 0;
  OK(store.attach_object("bench", ref, -1, position));
  hold.reset();
  // The first and last reference of this process: the bit in the table changes twice.
  report.add("hold_drop", median_ns(21, 100000, [&] {
               Hold first;
               OK(store.hold(ref, first));
             }));
  report.add("pin_unpin", median_ns(21, 100000, [&] {
               Pin pin;
               OK(store.pin(ref, Wait{}, pin));
             }));
  report.add("build_seal_free", median_ns(21, 20000, [&] {
               Draft draft;
               OK(store.reserve(1024, Wait{}, draft));
               Hold mine;
               OK(store.seal(draft, &mine));
               Ref const made = mine.ref();
               std::uint64_t ended = 0;
               OK(store.free({&made, 1}, false, ended));
             }));
  report.add("build_seal_drop", median_ns(21, 20000, [&] {
               Draft draft;
               OK(store.reserve(1024, Wait{}, draft));
               Hold mine;
               OK(store.seal(draft, &mine));
             }));
}

void copies(Report& report, Store& store, bool quick) {
  for (std::uint64_t size : {std::uint64_t{1} << 20, std::uint64_t{64} << 20, std::uint64_t{1} << 30}) {
    if (quick && size > (64u << 20)) continue;
    std::string const mib = std::to_string(size >> 20) + "MiB";
    std::vector<char> source(size, 1);
    Draft draft;
    OK(store.reserve(size, Wait{}, draft));
    std::memset(draft.data(), 0, size);  // warm
    int const batches = size >= (1u << 30) ? 3 : size >= (64u << 20) ? 9 : 51;
    report.add("memcpy_" + mib,
               median_ns(batches, 1, [&] { std::memcpy(draft.data(), source.data(), size); }));
    for (unsigned threads : {1u, 2u})
      report.add("copy_in_" + mib + "_threads" + std::to_string(threads),
                 median_ns(batches, 1, [&] { copy_in(draft.data(), source.data(), size, threads); }));
  }
}

void many(Report& report, const std::string& name, bool quick) {
  Options o;
  o.capacity = 1u << 30;
  o.max_objects = 200000;
  auto store = create(name, o);
  std::vector<Hold> holds;
  int const count = quick ? 10000 : 100000;
  for (int i = 0; i < count; ++i) holds.push_back(put(*store, 1024, i & 255));
  Stats stats;
  report.add("stats_" + std::to_string(count) + "_objects", median_ns(21, 1, [&] { OK(store->stats(stats)); }));
  std::vector<std::string> problems;
  report.add("check_" + std::to_string(count) + "_objects",
             median_ns(5, 1, [&] { OK(store->check(problems)); }));
  holds.clear();
  // 64 sessions of 8 objects each, released at once.
  std::vector<double> times;
  std::vector<std::string> ids;
  for (int i = 0; i < 64; ++i) ids.push_back("session-" + std::to_string(i));
  for (int round = 0; round < 21; ++round) {
    for (const std::string& id : ids) {
      OK(store->open(id, "producer"));
      for (int k = 0; k < 8; ++k) put(*store, 384 << 10, k, id).reset();
    }
    std::vector<std::string> moved, released;
    std::vector<Refusal> refused;
    Ids const views(ids.begin(), ids.end());
    double const begin = now_ns();
    OK(store->transfer(views, "producer", "learner", true, moved, refused));
    OK(store->release(views, "learner", true, released, refused));
    times.push_back(now_ns() - begin);
  }
  std::nth_element(times.begin(), times.begin() + 10, times.end());
  report.add("transfer_and_release_64x8", times[10]);
  // A client that dies with 10,000 objects: the next reservation that needs the bytes.
  times.clear();
  for (int round = 0; round < 5; ++round) {
    EXPECT(was_killed(wait_for(start([&] {
      auto mine = attach(name);
      std::vector<Hold> kept;
      for (int i = 0; i < 10000; ++i) kept.push_back(put(*mine, 1024, 1));
      die();
    }))));
    double const begin = now_ns();
    SweepReport swept;
    OK(store->sweep(swept));
    times.push_back(now_ns() - begin);
    EXPECT(swept.objects == 10000);
  }
  std::nth_element(times.begin(), times.begin() + 2, times.end());
  report.add("sweep_10000_objects", times[2]);
  store.reset();
  OK(Store::unlink(name));
}

}  // namespace

int main(int argc, char** argv) {
  bool const quick = argc > 1 && std::string(argv[1]) == "--quick";
  Report report;
  floors(report, quick);
  std::string const name = unique_name("bench-core");
  Options o;
  o.capacity = (quick ? 128ull : 1100ull) << 20;
  auto store = create(name, o);
  references(report, *store);
  copies(report, *store, quick);
  store.reset();
  OK(Store::unlink(name));
  many(report, unique_name("bench-many"), quick);
  report.print();
  return 0;
}
