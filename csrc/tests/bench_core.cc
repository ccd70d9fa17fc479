// What the core costs without Python, next to the machine's own floors, as JSON on stdout:
// {"rows": [{"work", "subject" ("core" or "floor"), "median_ns", "p99_ns", "n"}, ...]}.
//
//   shmrl_bench_core [--json] [--quick]
//
// A row's time is that of one operation; medians and 99th percentiles are over batches. Read by
// `python -m bench store`. Times say little on a busy machine; ratios of rows do.
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
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
          .count());
}

// The time of one of `count` calls, once per batch. Batches are shorter than a scheduler's time
// slice, so that on a busy machine the median is still one of undisturbed batches.
template <class Body>
std::vector<double> sample_ns(int batches, int count, Body body) {
  std::vector<double> times;
  for (int b = 0; b < batches; ++b) {
    double const begin = now_ns();
    for (int i = 0; i < count; ++i) body();
    times.push_back((now_ns() - begin) / count);
  }
  return times;
}

class Report {
 public:
  void core(const std::string& work, std::vector<double> times) {
    add(work, "core", std::move(times));
  }
  void floor(const std::string& work, std::vector<double> times) {
    add(work, "floor", std::move(times));
  }
  void print() const { std::printf("{\"rows\": [%s\n]}\n", text_.c_str()); }

 private:
  void add(const std::string& work, const char* subject, std::vector<double> times) {
    std::sort(times.begin(), times.end());
    std::size_t const n = times.size();
    char row[256];
    std::snprintf(row, sizeof row,
                  "%s\n  {\"work\": \"%s\", \"subject\": \"%s\", \"median_ns\": %.2f, "
                  "\"p99_ns\": %.2f, \"n\": %zu}",
                  text_.empty() ? "" : ",", work.c_str(), subject, times[n / 2],
                  times[std::min(n - 1, n * 99 / 100)], n);
    text_ += row;
  }
  std::string text_;
};

void floors(Report& report, bool quick) {
  void* const shared =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(shared != MAP_FAILED);
  auto* const word = static_cast<std::atomic<std::uint32_t>*>(shared);
  report.floor("atomic add", sample_ns(201, 2000, [&] { word->fetch_add(1); }));
  auto* const mutex = reinterpret_cast<pthread_mutex_t*>(static_cast<char*>(shared) + 256);
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(mutex, &attributes);
  report.floor("robust mutex lock+unlock", sample_ns(201, 2000, [&] {
                 ::pthread_mutex_lock(mutex);
                 ::pthread_mutex_unlock(mutex);
               }));
  report.floor("system call", sample_ns(201, 500, [] { ::syscall(SYS_getppid); }));
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
    report.floor(spin ? "spinning round trip" : "futex round trip", std::move(times));
  }
  ::munmap(shared, 4096);
}

void references(Report& report, Store& store) {
  Hold hold = put(store, 1024, 1);
  Ref const ref = hold.ref();
  report.core("hold+drop, held already", sample_ns(201, 2000, [&] {
                Hold again;
                OK(store.hold(ref, again));
              }));
  OK(store.open("bench", "bench"));
  std::uint32_t position = 0;
  OK(store.attach_object("bench", ref, -1, position));
  hold.reset();
  // The first and last reference of this process: the bit in the table changes twice.
  report.core("hold+drop", sample_ns(201, 2000, [&] {
                Hold first;
                OK(store.hold(ref, first));
              }));
  report.core("pin+unpin", sample_ns(201, 2000, [&] {
                Pin pin;
                OK(store.pin(ref, Wait{}, pin));
              }));
  report.core("build+seal+free", sample_ns(201, 500, [&] {
                Draft draft;
                OK(store.reserve(1024, Wait{}, draft));
                Hold mine;
                OK(store.seal(draft, &mine));
                Ref const made = mine.ref();
                std::uint64_t ended = 0;
                OK(store.free({&made, 1}, false, ended));
              }));
  report.core("build+seal+drop", sample_ns(201, 500, [&] {
                Draft draft;
                OK(store.reserve(1024, Wait{}, draft));
                Hold mine;
                OK(store.seal(draft, &mine));
              }));
}

void copies(Report& report, Store& store, bool quick) {
  for (std::uint64_t size :
       {std::uint64_t{1} << 20, std::uint64_t{64} << 20, std::uint64_t{1} << 30}) {
    if (quick && size > (64u << 20)) continue;
    std::string const mib = std::to_string(size >> 20) + " MiB";
    std::vector<char> source(size, 1);
    Draft draft;
    OK(store.reserve(size, Wait{}, draft));
    std::memset(draft.data(), 0, size);  // warm
    int const batches = size >= (1u << 30) ? 3 : size >= (64u << 20) ? 9 : 51;
    report.floor("memcpy " + mib,
                 sample_ns(batches, 1, [&] { std::memcpy(draft.data(), source.data(), size); }));
    for (unsigned threads : {1u, 2u})
      report.core(
          "copy in " + mib + ", threads " + std::to_string(threads),
          sample_ns(batches, 1, [&] { copy_in(draft.data(), source.data(), size, threads); }));
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
  report.core("stats, " + std::to_string(count) + " objects",
              sample_ns(21, 1, [&] { OK(store->stats(stats)); }));
  std::vector<std::string> problems;
  report.core("check, " + std::to_string(count) + " objects",
              sample_ns(5, 1, [&] { OK(store->check(problems)); }));
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
  report.core("transfer + release of 64 sessions x 8 objects", times);
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
  report.core("sweep of a dead client with 10000 objects", times);
  store.reset();
  OK(Store::unlink(name));
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    std::string const arg = argv[i];
    if (arg == "--quick") quick = true;
    if (arg == "--quick" || arg == "--json") continue;  // JSON is what there is
    std::fprintf(stderr, "usage: shmrl_bench_core [--json] [--quick]\n");
    return 2;
  }
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
