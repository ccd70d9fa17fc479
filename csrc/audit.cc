#include "audit.h"

#include <algorithm>

#include "block_allocator.h"
#include "object_table.h"
#include "session_table.h"

namespace shmrl {
namespace {

namespace os = object_state;

class Audit {
 public:
  Audit(const Arena& arena, std::vector<std::string>& problems, std::vector<Unsettled>& transient)
      : arena_(arena), problems_(problems), transient_(transient) {}

  void run() {
    header();
    sessions();
    owners();
    objects();
    free_lists();
    clients();
  }

 private:
  void report(const std::string& what) {
    if (problems_.size() < kProblemsMax) problems_.push_back(what);
  }
  static std::string at(const char* what, std::uint64_t index) {
    return std::string(what) + " " + std::to_string(index);
  }
  void compare(const char* what, std::uint64_t said, std::uint64_t found) {
    if (said != found)
      report(std::string(what) + " says " + std::to_string(said) + ", there are " +
             std::to_string(found));
  }

  void header() {
    const Header& h = arena_.header();
    if (h.journal.get() != 0) report("the journal is not empty");
    std::uint64_t waiters = 0;
    for (std::uint32_t i = 0; i < kWaitersMax; ++i)
      waiters += arena_.waiter(i).ticket.get() != 0 ? 1 : 0;
    compare("the count of waiters", h.waiters.get(), waiters);
  }

  void sessions() {
    attached_.assign(arena_.objects_used(), 0);
    node_used_.assign(arena_.attachments_used(), false);
    owner_sessions_.assign(arena_.owners_used(), 0);
    owner_objects_.assign(arena_.owners_used(), 0);
    owner_bytes_.assign(arena_.owners_used(), 0);
    std::uint64_t open = 0;
    for (std::uint32_t i = 0; i < arena_.sessions_used(); ++i) {
      if (!is_open(arena_.session(i).state.get())) continue;
      ++open;
      session(i);
    }
    compare("the count of sessions", arena_.header().sessions_open.get(), open);
  }

  void session(std::uint32_t i) {
    SessionEntry& s = arena_.session(i);
    if (find_session(arena_, s.id.view()) != i) report(at("the index does not lead to session", i));
    std::uint32_t const owner = owner_in(s.state.get());
    if (owner >= arena_.owners_used() || arena_.owner(owner).used.get() == 0)
      return report(at("no owner of session", i));
    std::uint32_t tail = kNil;
    std::uint64_t bytes = 0;
    for_each_attachment(arena_, s, [&](std::uint32_t position, std::uint32_t node) {
      Attachment& a = arena_.attachment(node);
      if (node_used_[node]) report(at("two lists share attachment", node));
      node_used_[node] = true;
      ObjectEntry& e = arena_.object(a.object.get());
      std::uint64_t const word = e.state.load(std::memory_order_relaxed);
      if (generation_of(word) != a.generation.get() || state_of(word) != os::kSealed)
        report(at("session", i) + at(" holds an object that is not sealed, entry", a.object.get()));
      if ((word & os::kEverAttached) == 0)
        report(at("not marked as attached: object", a.object.get()));
      if (a.previous.get() != tail) report(at("broken back link of attachment", node));
      if (a.parent.get() != kNil && a.parent.get() >= position)
        report(at("a parent after its child in session", i));
      ++attached_[a.object.get()];
      bytes += size_of(e);
      tail = node;
    });
    if (s.count.get() > 0 && s.tail.get() != tail) report(at("wrong tail of session", i));
    if (s.bytes.get() != bytes) report(at("wrong byte sum of session", i));
    ++owner_sessions_[owner];
    owner_objects_[owner] += s.count.get();
    owner_bytes_[owner] += bytes;
  }

  void owners() {
    for (std::uint32_t i = 0; i < arena_.owners_used(); ++i) {
      OwnerEntry& o = arena_.owner(i);
      if (o.used.get() == 0) continue;
      if (find_owner(arena_, o.name.view()) != i) report(at("the index does not lead to owner", i));
      compare(("owner " + std::string(o.name.view()) + ": sessions").c_str(), o.sessions.get(),
              owner_sessions_[i]);
      compare(("owner " + std::string(o.name.view()) + ": objects").c_str(), o.objects.get(),
              owner_objects_[i]);
      compare(("owner " + std::string(o.name.view()) + ": bytes").c_str(), o.bytes.get(),
              owner_bytes_[i]);
      std::uint64_t listed = 0;
      std::uint32_t before = kNil;
      for_each_session_of(arena_, i, [&](std::uint32_t s) {
        std::uint64_t const word = arena_.session(s).state.get();
        if (!is_open(word) || owner_in(word) != i)
          report(at("the list of an owner has a session that is not its own,", s));
        if (arena_.session(s).owner_previous.get() != before)
          report(at("broken back link of session", s));
        before = s;
        ++listed;
      });
      compare("the list of an owner", listed, owner_sessions_[i]);
      if (o.last.get() != before) report(at("wrong end of the list of owner", i));
      if (o.heir.get() != kNil &&
          (o.heir.get() >= arena_.owners_used() || arena_.owner(o.heir.get()).used.get() == 0))
        report(at("no such heir of owner", i));
    }
  }

  void objects() {
    std::vector<UsedBlock> blocks;
    std::uint64_t live = 0, doomed = 0, doomed_bytes = 0, used_bytes = 0;
    std::uint64_t const generations = arena_.header().next_generation.get();
    for (std::uint32_t i = 0; i < arena_.objects_used(); ++i) {
      ObjectEntry& e = arena_.object(i);
      std::uint64_t const word = e.state.load(std::memory_order_seq_cst);
      std::uint64_t const state = state_of(word);
      if (state == os::kFree) {
        if (attached_[i] != 0) report(at("a session holds free entry", i));
        continue;
      }
      if (state > os::kDoomed) {
        report(at("unknown state of object", i));
        continue;
      }
      if (generation_of(word) == 0 || generation_of(word) >= generations)
        report(at("a generation from the future at object", i));
      if (e.attached.get() != attached_[i])
        compare(at("attachments of object", i).c_str(), e.attached.get(), attached_[i]);
      // What was attached once ends with its last attachment.
      if (state == os::kSealed && (word & os::kEverAttached) != 0 && attached_[i] == 0)
        report(at("no session holds attached object", i));
      if (needs_settling(e)) transient_.push_back({i, generation_of(word)});
      std::uint64_t const size = size_of(e);
      if (size > arena_.payload_bytes()) {
        report(at("impossible size of object", i));
        continue;
      }
      ++live;
      used_bytes += block_bytes(size);
      if (state == os::kDoomed) {
        ++doomed;
        doomed_bytes += block_bytes(size);
      }
      blocks.push_back({size, block_of(e)});
    }
    const Header& h = arena_.header();
    compare("the count of objects", h.objects_live.get(), live);
    compare("the count of doomed objects", h.objects_doomed.get(), doomed);
    compare("the bytes of doomed objects", h.doomed_bytes.get(), doomed_bytes);
    compare("the bytes in use", h.used_bytes.get(), used_bytes);
    live_ = live;
    audit_blocks(arena_, blocks, problems_);
  }

  template <class Next, class IsFree>
  void free_list(const char* name, std::uint32_t head, std::uint64_t entries,
                 std::uint64_t expected, Next next, IsFree is_free) {
    std::uint64_t found = 0;
    for (std::uint32_t i = head; i != kNil; i = next(i)) {
      if (i >= entries || ++found > entries) return report(std::string(name) + ": broken list");
      if (!is_free(i)) return report(at(name, i) + " is in use, and in the free list");
    }
    compare(name, found, expected);
  }

  void free_lists() {
    const Header& h = arena_.header();
    free_list(
        "free object entries", h.free_object.get(), arena_.objects_used(),
        arena_.objects_used() - live_,
        [&](std::uint32_t i) { return arena_.object(i).next_free.get(); },
        [&](std::uint32_t i) {
          return state_of(arena_.object(i).state.load(std::memory_order_relaxed)) == os::kFree;
        });
    auto const used_nodes =
        static_cast<std::uint64_t>(std::count(node_used_.begin(), node_used_.end(), true));
    free_list(
        "free attachments", h.free_attachment.get(), arena_.attachments_used(),
        arena_.attachments_used() - used_nodes,
        [&](std::uint32_t i) { return arena_.attachment(i).next.get(); },
        [&](std::uint32_t i) { return !node_used_[i]; });
    free_list(
        "free session entries", h.free_session.get(), arena_.sessions_used(),
        arena_.sessions_used() - h.sessions_open.get(),
        [&](std::uint32_t i) { return arena_.session(i).hash_next.get(); },
        [&](std::uint32_t i) { return !is_open(arena_.session(i).state.get()); });
    std::uint64_t owners = 0;
    for (std::uint32_t i = 0; i < arena_.owners_used(); ++i)
      owners += arena_.owner(i).used.get() != 0 ? 1 : 0;
    free_list(
        "free owner entries", h.free_owner.get(), arena_.owners_used(),
        arena_.owners_used() - owners,
        [&](std::uint32_t i) { return arena_.owner(i).hash_next.get(); },
        [&](std::uint32_t i) { return arena_.owner(i).used.get() == 0; });
  }

  // A slot that is free must be remembered nowhere, or its next holder would inherit.
  void clients() {
    const Header& h = arena_.header();
    for (std::uint32_t k = 0; k < kMaskWords; ++k) {
      std::uint64_t const free = ~h.live[k].get();
      for (std::uint32_t i = 0; i < arena_.objects_used(); ++i) {
        ObjectEntry& e = arena_.object(i);
        if (((e.holds[k].load(std::memory_order_relaxed) |
              e.pins[k].load(std::memory_order_relaxed)) &
             free) != 0)
          report(at("a client that has left still refers to object", i));
      }
      for (std::uint32_t i = 0; i < arena_.owners_used(); ++i)
        if (arena_.owner(i).used.get() != 0 && (arena_.owner(i).bound[k].get() & free) != 0)
          report(at("a client that has left is still bound as owner", i));
    }
  }

  static constexpr std::size_t kProblemsMax = 1000;
  const Arena& arena_;
  std::vector<std::string>& problems_;
  std::vector<Unsettled>& transient_;
  std::vector<std::uint32_t> attached_;
  std::vector<bool> node_used_;
  std::vector<std::uint64_t> owner_sessions_, owner_objects_, owner_bytes_;
  std::uint64_t live_ = 0;
};

}  // namespace

void audit_arena(const Arena& arena, std::vector<std::string>& problems,
                 std::vector<Unsettled>& transient) {
  try {
    Audit(arena, problems, transient).run();
  } catch (const Failure& failure) {
    problems.push_back(failure.text());
  }
}

}  // namespace shmrl
