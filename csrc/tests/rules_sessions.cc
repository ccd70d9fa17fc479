// Rules about sessions and owners.

#include <algorithm>

#include "rules.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

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

using Names = std::vector<std::string>;

RULE(L01_transfer_moves_all_or_says_which_did_not) {
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

RULE(L02_an_attached_object_lives_exactly_as_long_as_a_session_holds_it) {
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

RULE(L03_release_returns_what_it_released_in_order_each_once) {
  Fixture f;
  for (const char* id : {"a", "b", "c"}) OK(f.store->open(id, "p"));
  EXPECT((release(*f.store, {"c", "none", "a", "c", "a"}, "p") == Names{"c", "a"}));
  EXPECT((release(*f.store, {"c", "b"}, "p") == Names{"b"}));
  EXPECT(release(*f.store, {"a", "b", "c"}, "p", true).empty());  // unknown is no error
}

RULE(L03_two_releasers_get_each_id_once) {
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

RULE(L04_releasing_what_someone_else_owns_is_refused) {
  Fixture f;
  OK(f.store->open("mine", "learner"));
  OK(f.store->open("theirs", "producer"));
  EXPECT((release(*f.store, {"theirs", "mine"}, "learner", true, Status::not_owner).empty()));
  EXPECT(owner_of(*f.store, "mine") == "learner");
  EXPECT((release(*f.store, {"theirs", "mine"}, "learner") == Names{"mine"}));
  EXPECT((release(*f.store, {"theirs"}, "an owner nobody ever named").empty()));
  EXPECT(owner_of(*f.store, "theirs") == "producer");
  EXPECT((release(*f.store, {"theirs"}, "*") == Names{"theirs"}));
}

RULE(a_released_session_is_never_resurrected) {
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

RULE(a_session_lists_its_objects_in_order_with_parents) {
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

RULE(names_are_checked) {
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

RULE(unused_owners_make_room_for_new_ones) {
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

RULE(sessions_and_attachments_have_limits) {
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

RULE(a_strict_free_of_any_number_of_objects_frees_all_or_nothing) {
  Options options = small(4u << 20);
  options.max_sessions = 16;  // and so many objects end in one journalled step
  Fixture f(options);
  OK(f.store->open("s", "p"));
  std::vector<Hold> holds;
  std::vector<Ref> refs;
  for (int i = 0; i < 100; ++i) {
    holds.push_back(put(*f.store, 64, i));
    refs.push_back(holds.back().ref());
  }
  std::uint32_t position = 0;
  OK(f.store->attach_object("s", refs.back(), -1, position));
  std::uint64_t ended = 9;
  EXPECT_STATUS(Status::not_owner, f.store->free(refs, true, ended));
  EXPECT(ended == 0);
  for (const Ref& ref : refs) OK(f.store->probe(ref));
  OK(f.store->free(refs, false, ended));
  EXPECT(ended == 99);
  OK(f.store->probe(refs.back()));
}

}  // namespace
