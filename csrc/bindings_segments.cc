// Segments of the trainer: whole paths of sessions into arrays of their own, in one call.
//
// Owns nothing. Follows the parents from a node to its root, pins what lies there and copies it
// once. What makes the routing of a path complete is decided here; the sentences for one that is
// not are `refuse`'s, in Python. Promises: nothing stays pinned after a call.

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "bindings_store.h"
#include "segment_format.h"

namespace shmrl::py {
namespace {

constexpr std::size_t kColumns = 4;
constexpr std::array<int, kColumns> kColumnTypes = {NPY_INT32, NPY_INT32, NPY_FLOAT32, NPY_INT32};

// One segment of a path, in the arena or in bytes that were made of it.
struct Part {
  Pin pin;
  nb::object converted;
  const std::byte* data = nullptr;
  SegmentPlaces places;
};

nb::object new_array(int type, std::initializer_list<std::uint64_t> shape, std::byte*& data) {
  std::array<npy_intp, 3> extents{};
  std::copy(shape.begin(), shape.end(), extents.begin());
  nb::object array =
      nb::steal(checked(PyArray_SimpleNew(static_cast<int>(shape.size()), extents.data(), type)));
  data = static_cast<std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
  return array;
}

nb::tuple to_tuple(const std::vector<std::int64_t>& numbers) {
  nb::object tuple = nb::steal(checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size()))));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i),
                     checked(PyLong_FromLongLong(numbers[i])));
  return nb::borrow<nb::tuple>(tuple);
}

class PathReader {
 public:
  PathReader(StoreCore& core, bool with_routing, nb::handle foreign, nb::handle refuse)
      : store_(core), with_routing_(with_routing), foreign_(foreign), refuse_(refuse) {}

  // -> (token_ids, labels, logprobs, model_steps, routed_experts or None, nodes)
  nb::object read(nb::handle session, std::int64_t node) {
    session_ = session;
    follow(node);
    n_ = 0;
    for (const std::int64_t one : nodes_) {
      parts_.push_back(part(entries_[static_cast<std::size_t>(one)].ref));
      n_ += parts_.back().places.n;
    }
    std::array<nb::object, kColumns> columns;
    std::array<std::byte*, kColumns> to;
    for (std::size_t c = 0; c < kColumns; ++c) columns[c] = new_array(kColumnTypes[c], {n_}, to[c]);
    const nb::object routed = with_routing_ && has_routing() ? this->routed() : nb::none();
    {
      const auto released = without_gil(kColumns * sizeof(std::int32_t) * n_);
      for (const Part& p : parts_)
        for (std::size_t c = 0; c < kColumns; ++c) {
          const std::uint64_t bytes = sizeof(std::int32_t) * p.places.n;
          if (bytes == 0) continue;
          std::memcpy(to[c], p.data + p.places.numbers_at + c * p.places.column_bytes, bytes);
          to[c] += bytes;
        }
    }
    parts_.clear();
    return nb::steal(checked(PyTuple_Pack(6, columns[0].ptr(), columns[1].ptr(), columns[2].ptr(),
                                          columns[3].ptr(), routed.ptr(), to_tuple(nodes_).ptr())));
  }

 private:
  // The nodes from the root to `node`.
  void follow(std::int64_t node) {
    require(store_->objects(parse_text(session_, "a session id"), entries_));
    nodes_.clear();
    const auto count = static_cast<std::int64_t>(entries_.size());
    if (node < 0 || node >= count) refuse("node", nb::make_tuple(node, count));
    while (node >= 0) {
      nodes_.push_back(node);
      const std::int64_t parent = entries_[static_cast<std::size_t>(node)].parent;
      if (parent >= node) raise("ArenaDamaged", "an entry of a session stands before its parent");
      node = parent;
    }
    std::reverse(nodes_.begin(), nodes_.end());
  }

  Part part(const Ref& ref) {
    Part found;
    require(store_->pin(ref, Wait{}, found.pin));
    found.data = found.pin.data();
    if (find_segment(found.data, found.pin.size(), found.places) == SegmentKind::whole)
      return found;
    const nb::object name = nb::steal(new_ref(ref, Hold()));
    found.converted = foreign_(name);
    if (PyBytes_Check(found.converted.ptr())) {
      found.data = reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(found.converted.ptr()));
      const auto size = static_cast<std::uint64_t>(PyBytes_GET_SIZE(found.converted.ptr()));
      if (find_segment(found.data, size, found.places) == SegmentKind::whole) return found;
    }
    raise("BadValue", "`foreign` makes a segment with a trailer of what has none, as bytes");
  }

  bool has_routing() const {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const Part& p) { return p.places.n > 0 && p.places.itemsize > 0; });
  }

  // All segments with tokens carry experts, and in one form; of differing types the wider.
  std::uint64_t check_form() {
    const Part* first = nullptr;
    std::uint64_t itemsize = 0;
    bool alike = true;
    for (const Part& p : parts_) {
      if (p.places.n == 0) continue;
      if (first == nullptr) first = &p;
      alike = alike && p.places.itemsize > 0 && p.places.layers == first->places.layers &&
              p.places.top_k == first->places.top_k;
      itemsize = std::max(itemsize, p.places.itemsize);
    }
    if (alike) return itemsize;
    nb::list forms;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const SegmentPlaces& places = parts_[i].places;
      if (places.n == 0) continue;
      const nb::object form = places.itemsize == 0
                                  ? nb::none()
                                  : nb::object(nb::make_tuple(places.layers, places.top_k));
      forms.append(nb::make_tuple(nodes_[i], form));
    }
    refuse("differ", forms);
  }

  // Every row but that of the very last token is known, at the latest from the segment behind it.
  void check_rows() {
    std::uint64_t end = 0, unknown = 0;
    std::int64_t culprit = -1;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const SegmentPlaces& places = parts_[i].places;
      if (places.n == 0) continue;
      if (places.n_before > end) refuse("before", nb::make_tuple(nodes_[i], places.n_before, end));
      unknown -= std::min(unknown, places.n_before);
      if (unknown > 0) refuse("unknown", nb::make_tuple(unknown, culprit, nodes_[i]));
      end += places.n;
      unknown = places.n - places.n_routed;
      culprit = nodes_[i];
    }
    if (unknown > 1) refuse("unknown", nb::make_tuple(unknown, culprit, nb::none()));
  }

  // The experts of the whole path; what became known with a later segment stands in its place.
  nb::object routed() {
    const std::uint64_t itemsize = check_form();
    check_rows();
    const SegmentPlaces& form = std::find_if(parts_.begin(), parts_.end(), [](const Part& p) {
                                  return p.places.n > 0;
                                })->places;
    const std::uint64_t row = form.layers * form.top_k;
    std::byte* to = nullptr;
    nb::object rows =
        new_array(itemsize == 1 ? NPY_UINT8 : NPY_UINT16, {n_, form.layers, form.top_k}, to);
    const auto released = without_gil(n_ * row * itemsize);
    for (const Part& p : parts_) {
      const SegmentPlaces& places = p.places;
      if (places.n == 0) continue;
      if (places.n_before > 0)
        widen(to - places.n_before * row * itemsize, itemsize, p.data + places.before_at,
              places.itemsize, places.n_before * row);
      widen(to, itemsize, p.data + places.routed_at, places.itemsize, places.n * row);
      to += places.n * row * itemsize;
    }
    return rows;
  }

  // Copies `count` numbers of `from_bytes` each as numbers of `to_bytes`, the same or wider.
  static void widen(std::byte* to, std::uint64_t to_bytes, const std::byte* from,
                    std::uint64_t from_bytes, std::uint64_t count) noexcept {
    if (to_bytes == from_bytes) {
      if (count > 0) std::memcpy(to, from, count * from_bytes);
      return;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto number = static_cast<std::uint16_t>(from[i]);
      std::memcpy(to + i * sizeof(number), &number, sizeof(number));
    }
  }

  static std::optional<WithoutGil> without_gil(std::uint64_t bytes) {
    if (bytes < kCopyWithoutGilMin) return std::nullopt;
    return std::optional<WithoutGil>(std::in_place);
  }

  template <class Details>
  [[noreturn]] void refuse(const char* what, const Details& details) {
    refuse_(what, session_, to_tuple(nodes_), details);
    raise("BadValue", "`refuse` has to raise");
  }

  StoreCore::Use store_;
  const bool with_routing_;
  const nb::handle foreign_, refuse_;
  // Of the path that is being read.
  nb::handle session_;
  std::vector<Entry> entries_;
  std::vector<std::int64_t> nodes_;
  std::vector<Part> parts_;
  std::uint64_t n_ = 0;
};

nb::list read_paths(StoreCore& core, nb::handle places, nb::handle with_routing, nb::handle foreign,
                    nb::handle refuse) {
  // A tuple of our own: what is called on the way may change a list.
  const nb::object all = nb::steal(checked(PySequence_Tuple(places.ptr())));
  PathReader reader(core, parse_flag(with_routing, "with_routing"), foreign, refuse);
  nb::list paths;
  for (nb::handle place : nb::borrow<nb::tuple>(all)) {
    if (!PyTuple_Check(place.ptr()) || PyTuple_GET_SIZE(place.ptr()) != 2)
      raise("BadValue", "a place is a pair of a session and a node");
    const Py_ssize_t node = PyNumber_AsSsize_t(PyTuple_GET_ITEM(place.ptr(), 1), nullptr);
    if (node == -1 && PyErr_Occurred()) nb::raise_python_error();
    paths.append(reader.read(PyTuple_GET_ITEM(place.ptr(), 0), node));
  }
  return paths;
}

// For views of one segment; None when the bytes end in no trailer.
nb::object segment_places(nb::handle whole) {
  Py_buffer buffer{};
  if (PyObject_GetBuffer(whole.ptr(), &buffer, PyBUF_SIMPLE) < 0) nb::raise_python_error();
  SegmentPlaces places;
  const auto size = static_cast<std::uint64_t>(buffer.len);
  const SegmentKind kind = find_segment(static_cast<const std::byte*>(buffer.buf), size, places);
  PyBuffer_Release(&buffer);
  if (kind == SegmentKind::none) return nb::none();
  if (kind == SegmentKind::damaged)
    raise("ArenaDamaged", "a segment of " + std::to_string(places.n) + " tokens and " +
                              std::to_string(places.text_bytes) +
                              " bytes of text does not fit its " + std::to_string(size) +
                              " bytes: its trailer was overwritten");
  return nb::make_tuple(places.n, places.numbers_at, places.column_bytes, places.layers,
                        places.top_k, places.itemsize, places.routed_at, places.n_routed,
                        places.before_at, places.n_before, places.text_at,
                        places.text_at + places.text_bytes);
}

void* import_numpy() {
  import_array();
  return &g_hooks;
}

}  // namespace

void bind_segments(nb::class_<StoreCore>& type, nb::module_& module) {
  if (import_numpy() == nullptr) nb::raise_python_error();
  using nb::arg;
  type.def("read_paths", &read_paths, arg("places"), arg("with_routing").none(), arg("foreign"),
           arg("refuse"));
  module.def("segment_places", &segment_places, arg("whole"));
}

}  // namespace shmrl::py
