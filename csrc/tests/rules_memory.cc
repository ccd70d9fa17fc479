// Rules about memory: file systems, read-only pages, copies, the cost of tables.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

// ray#14182, pytorch#5247: somebody else fills the file system. Needs a tmpfs of its own, which
// root or an unprivileged user namespace may mount.
RULE(a_full_file_system_is_an_error_and_no_signal) {
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
    // Giving back needs no memory, however full it is.
    std::vector<Hold> loose;
    for (int i = 0; i < 40; ++i) {
      OK(store->open("s-" + std::to_string(i), "p"));
      put(*store, 64, i, "s-" + std::to_string(i)).reset();
      loose.push_back(put(*store, 64, i));
    }
    off_t filled = 40 << 20;
    while (::posix_fallocate(fd, filled, 4096) == 0) filled += 4096;
    std::vector<std::string> released;
    OK(store->release_owned("p", released));
    EXPECT(released.size() == 40);
    std::vector<Ref> refs;
    for (const Hold& hold : loose) refs.push_back(hold.ref());
    std::uint64_t ended = 0;
    OK(store->free(refs, true, ended));
    EXPECT(ended == 40);
    loose.clear();
    EXPECT_SOUND(*store);
    EXPECT(::ftruncate(fd, 0) == 0);
    OK(store->reserve(50u << 20, Wait{}, draft));
    std::memset(draft.data(), 1, draft.size());
  });
  EXPECT(exited_well(wait_for(child)));
  EXPECT(::rmdir(folder) == 0);
}

RULE(readers_cannot_write) {
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

RULE(copies_arrive_whole) {
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
}

RULE(a_fork_child_makes_copying_threads_of_its_own) {
  std::vector<unsigned char> once(20u << 20, 5), there(20u << 20);
  copy_in(there.data(), once.data(), once.size(), 2);  // threads here, none in the child
  EXPECT(exited_well(wait_for(start([] {
    std::vector<unsigned char> from(20u << 20, 5), to(20u << 20);
    copy_in(to.data(), from.data(), from.size(), 2);
    EXPECT(from == to);
  }))));
}

RULE(tables_cost_at_most_128_bytes_per_object) {
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

}  // namespace
