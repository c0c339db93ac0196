// The members of structure RECORD, whose list is the file FIELDS, and fields(): a tuple of a RecordField for each. To be
// included within the structure, before other members.
#define FIELD(type, name, ...) type name = __VA_ARGS__;
#include FIELDS
#undef FIELD

#define FIELD(type, name, ...) std::tuple(RecordField{#name, &RECORD::name}),
static constexpr auto fields() {
  return std::tuple_cat(
#include FIELDS
      std::tuple<>());
}
#undef FIELD

#undef FIELDS
#undef RECORD
