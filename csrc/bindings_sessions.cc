// The session table: texts in, texts and refs out. Decides nothing; every call is one call of
// store.h.

#include <limits>
#include <set>
#include <vector>

#include "bindings_store.h"

namespace shmrl::py {
namespace {

nb::list to_list(const std::vector<std::string>& texts) {
  nb::list list;
  for (const std::string& text : texts) list.append(to_str(text));
  return list;
}

std::string_view parse_session(nb::handle text) { return parse_text(text, "a session id"); }
std::string_view parse_owner(nb::handle text) { return parse_text(text, "an owner"); }

// The texts stay valid while the list object lives.
std::vector<std::string_view> parse_sessions(const nb::list& ids) {
  std::vector<std::string_view> texts;
  texts.reserve(ids.size());
  for (nb::handle id : ids) texts.push_back(parse_session(id));
  return texts;
}

// NotOwner with a sentence that names the first few ids and who holds them.
[[noreturn]] void raise_refused(const char* verb, std::string_view owner,
                                const std::vector<Refusal>& refused) {
  constexpr std::size_t kNamedMax = 8;
  std::string message = "nothing was " + std::string(verb) + ": ";
  nb::list ids;
  for (std::size_t i = 0; i < refused.size(); ++i) {
    ids.append(to_str(refused[i].id));
    if (i >= kNamedMax) continue;
    if (i > 0) message += ", ";
    message += "'" + refused[i].id + "' ";
    message += refused[i].why == Status::not_owner
                   ? "is owned by '" + refused[i].holder + "', not '" + std::string(owner) + "'"
                   : "is not a live session";
  }
  if (refused.size() > kNamedMax)
    message += " and " + std::to_string(refused.size() - kNamedMax) + " more";
  nb::object error_class = nb::module_::import_("shmstore.errors").attr("NotOwner");
  nb::object error = error_class(to_str(message), nb::tuple(ids));
  PyErr_SetObject(error_class.ptr(), error.ptr());
  nb::raise_python_error();
}

void open(StoreCore& core, nb::handle id, nb::handle owner) {
  require(StoreCore::Use(core)->open(parse_session(id), parse_owner(owner)));
}

std::uint32_t attach(StoreCore& core, nb::handle id, nb::handle ref, std::int64_t parent) {
  if (parent > std::numeric_limits<std::int32_t>::max())
    raise("BadValue", "parent is not a position of this session");
  std::uint32_t position = 0;
  require(StoreCore::Use(core)->attach_object(parse_session(id), parse_ref(ref),
                                              static_cast<std::int32_t>(parent), position));
  return position;
}

nb::list objects(StoreCore& core, nb::handle id) {
  std::vector<Entry> entries;
  require(StoreCore::Use(core)->objects(parse_session(id), entries));
  nb::list list;
  for (const Entry& entry : entries) {
    nb::object ref = nb::steal(new_ref(entry.ref, Hold()));
    nb::object parent = entry.parent < 0 ? nb::none() : nb::object(nb::int_(entry.parent));
    PyObject* arguments[] = {ref.ptr(), parent.ptr()};
    list.append(nb::steal(checked(PyObject_Vectorcall(g_hooks.entry, arguments, 2, nullptr))));
  }
  return list;
}

std::uint64_t truncate(StoreCore& core, nb::handle id, std::int64_t keep) {
  std::uint64_t let_go = 0;
  require(StoreCore::Use(core)->truncate(parse_session(id), keep, let_go));
  return let_go;
}

nb::list transfer(StoreCore& core, const nb::list& ids, nb::handle src, nb::handle dst,
                  nb::handle strict_flag) {
  const bool strict = parse_flag(strict_flag, "strict");
  const auto texts = parse_sessions(ids);
  std::vector<std::string> moved;
  std::vector<Refusal> refused;
  const std::string_view source = parse_owner(src);
  const Status status =
      StoreCore::Use(core)->transfer(texts, source, parse_owner(dst), strict, moved, refused);
  if (strict && !refused.empty() &&
      (status == Status::not_owner || status == Status::session_released))
    raise_refused("transferred", source, refused);
  require(status);
  return to_list(moved);
}

nb::list release(StoreCore& core, const nb::list& ids, nb::handle owner, nb::handle strict_flag) {
  const bool strict = parse_flag(strict_flag, "strict");
  const auto texts = parse_sessions(ids);
  std::vector<std::string> released;
  std::vector<Refusal> refused;
  const std::string_view holder = parse_owner(owner);
  const Status status = StoreCore::Use(core)->release(texts, holder, strict, released, refused);
  if (strict && status == Status::not_owner && !refused.empty()) {
    std::erase_if(refused, [](const Refusal& refusal) { return refusal.why != Status::not_owner; });
    raise_refused("released", holder, refused);
  }
  require(status);
  return to_list(released);
}

nb::list release_owned(StoreCore& core, nb::handle owner) {
  std::vector<std::string> released;
  require(StoreCore::Use(core)->release_owned(parse_owner(owner), released));
  return to_list(released);
}

nb::object owner(StoreCore& core, nb::handle id) {
  std::string holder;
  require(StoreCore::Use(core)->owner(parse_session(id), holder));
  return to_str(holder);
}

nb::list owners(StoreCore& core, const nb::list& ids) {
  const auto texts = parse_sessions(ids);
  std::vector<std::string> holders;
  require(StoreCore::Use(core)->owners(texts, holders));
  nb::list list;
  for (const std::string& holder : holders)
    list.append(holder.empty() ? nb::none() : to_str(holder));
  return list;
}

std::uint64_t nbytes(StoreCore& core, const nb::list& ids) {
  const StoreCore::Use store(core);
  std::set<Ref> seen;
  std::vector<Entry> entries;
  std::uint64_t bytes = 0;
  for (std::string_view id : parse_sessions(ids)) {
    require(store->objects(id, entries));
    for (const Entry& entry : entries)
      if (seen.insert(entry.ref).second) bytes += value_bytes(*store, entry.ref);
  }
  return bytes;
}

nb::list list(StoreCore& core, nb::handle owner) {
  std::vector<std::string> ids;
  std::string_view holder;
  if (!owner.is_none()) {
    holder = parse_owner(owner);
    if (holder.empty()) raise("BadName", "an owner has 1 to 63 bytes, not none");
  }
  require(StoreCore::Use(core)->list(holder, ids));
  return to_list(ids);
}

bool contains(StoreCore& core, nb::handle id) {
  bool present = false;
  const Status status = StoreCore::Use(core)->contains(parse_session(id), present);
  if (status == Status::bad_id) return false;
  require(status);
  return present;
}

std::uint64_t count(StoreCore& core) {
  std::uint64_t sessions = 0;
  require(StoreCore::Use(core)->session_count(sessions));
  return sessions;
}

void bind_owner(StoreCore& core, nb::handle owner, nb::handle heir) {
  std::string_view heir_text;
  if (!heir.is_none()) {
    heir_text = parse_text(heir, "an heir");
    if (heir_text.empty()) raise("BadName", "an heir has 1 to 63 bytes; None means no heir");
  }
  require(StoreCore::Use(core)->bind(parse_owner(owner), heir_text));
}

void unbind_owner(StoreCore& core, nb::handle owner) {
  require(StoreCore::Use(core)->unbind(parse_owner(owner)));
}

}  // namespace

void bind_sessions(nb::class_<StoreCore>& type) {
  using nb::arg;
  type.def("session_open", &open, arg("session").none(), arg("owner").none())
      .def("session_attach", &attach, arg("session").none(), arg("ref").none(), arg("parent"))
      .def("session_objects", &objects, arg("session").none())
      .def("session_truncate", &truncate, arg("session").none(), arg("keep"))
      .def("session_transfer", &transfer, arg("sessions"), arg("src").none(), arg("dst").none(),
           arg("strict").none())
      .def("session_release", &release, arg("sessions"), arg("owner").none(), arg("strict").none())
      .def("session_release_owned", &release_owned, arg("owner").none())
      .def("session_owner", &owner, arg("session").none())
      .def("session_owners", &owners, arg("sessions"))
      .def("session_nbytes", &nbytes, arg("sessions"))
      .def("session_list", &list, arg("owner").none())
      .def("session_contains", &contains, arg("session").none())
      .def("session_count", &count)
      .def("session_bind", &bind_owner, arg("owner").none(), arg("heir").none())
      .def("session_unbind", &unbind_owner, arg("owner").none());
}

}  // namespace shmrl::py
