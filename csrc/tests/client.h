// A client below the facade, for rules about what one process leaves to another.
//
// In a child process only: it opens the lock file of an arena that the parent has open. One joins
// at a time.
#pragma once

#include "arena_file.h"
#include "client_table.h"
#include "harness.h"

namespace shmrl::test {

struct Client {
  explicit Client(const std::string& name) {
    open_arena_file(arena, name, Options{}.directory);
    join_arena(arena);
  }
  Arena arena;
};

// A child that dies with the arena's lock held and the arena marked dirty, after `last_act`.
inline void die_inside_a_transaction(
    const std::string& name,
    const std::function<void(Arena&, const Txn&)>& last_act = [](Arena&, const Txn&) {}) {
  EXPECT(was_killed(wait_for(start([&] {
    Client client(name);
    Txn const txn(client.arena);
    last_act(client.arena, txn);
    die();
  }))));
}

}  // namespace shmrl::test
