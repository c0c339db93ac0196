// Records: the structures that cross to Python. A record's fields are listed once, in a file NAME.inl, a line each:
//
//   FIELD(type, name, default)  // its unit
//
// The structure gets its members from the list, and Python the names, types and defaults (bindings/records.h).
#pragma once

#include <chrono>
#include <tuple>

namespace asyncengine {

using Seconds = std::chrono::duration<double>;

template <class Record, class Type>
struct RecordField {
  const char* name;
  Type Record::* member;
};
template <class Record, class Type>
RecordField(const char*, Type Record::*) -> RecordField<Record, Type>;

}  // namespace asyncengine
