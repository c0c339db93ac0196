// Records (core/record.h) in Python: settings are made from keywords, and what the core tells comes as named tuples.
#pragma once

#include <string>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "core/record.h"
#include "core/step_input.h"

namespace asyncengine {

// A field crosses as itself; in place of a pointer crosses an address, in place of a time a number.
template <class T>
struct Crossing {
  using Type = T;
  static T in(T value) { return value; }
  static T out(T value) { return value; }
};
template <class T>
struct Crossing<T*> {
  using Type = Address;
  static T* in(Address value) { return pointer<T>(value); }
  static Address out(T* value) { return reinterpret_cast<Address>(value); }
};
template <>
struct Crossing<Seconds> {
  using Type = double;
  static Seconds in(double value) { return Seconds(value); }
  static double out(Seconds value) { return value.count(); }
};

// Entries come as pairs of an EntryKind and its words.
template <>
struct Crossing<EntryWords> {
  using Type = std::vector<std::pair<uint32_t, std::vector<int32_t>>>;
  static EntryWords in(const Type& entries) {
    EntryWords packed;
    for (const auto& [kind, words] : entries) {
      require(kind > 0 && kind < 256 && words.size() <= kMaxEntryWords, "an entry's kind or length is out of range");
      packed.push_back(entry_header(kind, words.size()));
      packed.insert(packed.end(), words.begin(), words.end());
    }
    return packed;
  }
  static Type out(const EntryWords&) { return {}; }  // that of the default
};

// A class whose constructor takes the fields as keywords, with the defaults of C++. `check` throws for values that it refuses.
template <class Record, class Check>
py::class_<Record> bind_record(py::module_& m, const char* name, Check check) {
  py::class_<Record> type(m, name);
  const auto bind = [&]<class... Types>(RecordField<Record, Types>... fields) {
    const Record defaults{};
    type.def(py::init([=](typename Crossing<Types>::Type... values) {
               Record record{};
               ((record.*(fields.member) = Crossing<Types>::in(std::move(values))), ...);
               check(record);
               return record;
             }),
             py::kw_only(), (py::arg(fields.name) = Crossing<Types>::out(defaults.*(fields.member)))...);
  };
  std::apply(bind, Record::fields());
  return type;
}

// Programs may read the fields too.
template <class Record>
void make_readable(py::class_<Record>& type) {
  const auto read = [&](auto... fields) {
    (type.def_property_readonly(fields.name,
                                [member = fields.member](const Record& record) {
                                  using Type = std::decay_t<decltype(record.*member)>;
                                  return Crossing<Type>::out(record.*member);
                                }),
     ...);
  };
  std::apply(read, Record::fields());
}

inline py::object to_object(py::object value) { return value; }
inline py::object to_object(FinishReason reason) { return py::reinterpret_borrow<py::object>(to_python(reason)); }
template <class Number>
  requires std::is_arithmetic_v<Number>
py::object to_object(Number value) {
  return py::cast(value);
}

// A collections.namedtuple of the record's fields, which programs may make too.
template <class Record>
class NamedTuple {
 public:
  void bind(py::module_& m, const char* name) {
    const py::object make = py::module_::import("collections").attr("namedtuple");
    const auto names = [](auto... fields) { return py::make_tuple(fields.name...); };
    const auto defaults = [](auto... fields) { return py::make_tuple(to_object(Record{}.*(fields.member))...); };
    py::object type = make(name, std::apply(names, Record::fields()), py::arg("module") = "asyncengine._core",
                           py::arg("defaults") = std::apply(defaults, Record::fields()));
    m.attr(name) = type;
    type_ = type.release();
  }
  py::object operator()(Record record) const {
    const auto call = [&](auto... fields) { return type_(to_object(std::move(record.*(fields.member)))...); };
    return std::apply(call, Record::fields());
  }

 private:
  py::handle type_;  // for the life of the process, as the module
};

// A named tuple of a kind that C++ fills several times as fast, and that programs only read.
template <class Record>
class FastNamedTuple {
 public:
  void bind(py::module_& m, const char* name) {
    const auto describe = [](auto... fields) {
      static PyStructSequence_Field all[] = {{fields.name, nullptr}..., {nullptr, nullptr}};
      return all;
    };
    static std::string full_name;
    full_name = std::string("asyncengine._core.") + name;
    static PyStructSequence_Desc description{nullptr, nullptr, nullptr, std::tuple_size_v<decltype(Record::fields())>};
    description.name = full_name.c_str();
    description.fields = std::apply(describe, Record::fields());
    type_ = PyStructSequence_NewType(&description);
    if (type_ == nullptr) throw py::error_already_set();
    m.attr(name) = py::handle(reinterpret_cast<PyObject*>(type_));
  }
  py::object operator()(Record record) const {
    auto tuple = py::reinterpret_steal<py::object>(PyStructSequence_New(type_));
    if (!tuple) throw py::error_already_set();
    Py_ssize_t place = 0;
    const auto put = [&](py::object value) { PyStructSequence_SetItem(tuple.ptr(), place++, value.release().ptr()); };
    std::apply([&](auto... fields) { (put(to_object(std::move(record.*(fields.member)))), ...); }, Record::fields());
    return tuple;
  }

 private:
  PyTypeObject* type_ = nullptr;  // for the life of the process, as the module
};

}  // namespace asyncengine
