// Numbers that Python, the core and the device share: enums, the layout of a StepInput, sampling parameters. Each
// number is written once, in csrc/core/; Python and Triton read it from here.
#include <cstddef>
#include <utility>

#include "bindings/records.h"
#include "core/step_input.h"

namespace asyncengine {
namespace {

using Members = std::initializer_list<std::pair<const char*, uint32_t>>;

// A subclass of enum.IntEnum or enum.IntFlag.
py::object make_enum(py::module_& m, const char* base, const char* name, const Members& members) {
  py::dict values;
  for (const auto& [member, value] : members) values[member] = value;
  const py::module_ enums = py::module_::import("enum");
  py::object type = enums.attr(base)(name, values, py::arg("module") = "asyncengine._core");
  m.attr(name) = type;
  return type;
}

constexpr Members kFinishReasons = {
    {"none", static_cast<uint32_t>(FinishReason::kNone)},     {"stop", static_cast<uint32_t>(FinishReason::kStop)},
    {"length", static_cast<uint32_t>(FinishReason::kLength)}, {"aborted", static_cast<uint32_t>(FinishReason::kAborted)},
    {"failed", static_cast<uint32_t>(FinishReason::kFailed)}, {"step_failed", static_cast<uint32_t>(FinishReason::kStepFailed)},
};
PyObject* finish_members[kFinishReasons.size()];  // for the life of the process, as the module

PyObject* record_members[kLogits + 1];

// Offsets and sizes count 32-bit words.
#define WORD(type, field) static_cast<int64_t>(offsetof(type, field) / sizeof(int32_t))
#define WORDS(type) static_cast<int64_t>(sizeof(type) / sizeof(int32_t))

py::dict step_input_layout() {
  py::dict d;
  const auto put = [&d](const char* name, int64_t value) { d[name] = value; };
  put("magic", StepInputView::kMagic);
  put("header_words", WORDS(StepInputHeader));
  put("header.total_words", WORD(StepInputHeader, total_words));
  put("header.step", WORD(StepInputHeader, step));
  put("header.num_rows", WORD(StepInputHeader, num_rows));
  put("header.num_decode_rows", WORD(StepInputHeader, num_decode_rows));
  put("header.num_tokens", WORD(StepInputHeader, num_tokens));
  put("header.num_samples", WORD(StepInputHeader, num_samples));
  put("header.num_prompt_ids", WORD(StepInputHeader, num_prompt_ids));
  put("header.num_copies", WORD(StepInputHeader, num_copies));
  put("header.num_slot_updates", WORD(StepInputHeader, num_slot_updates));
  put("header.num_delta_blocks", WORD(StepInputHeader, num_delta_blocks));
  put("header.needs", WORD(StepInputHeader, needs));
  put("header.max_context", WORD(StepInputHeader, max_context));
  put("header.num_heads", WORD(StepInputHeader, num_heads));
  put("header.num_result_words", WORD(StepInputHeader, num_result_words));
  put("header.num_lanes", WORD(StepInputHeader, host_rows.num_lanes));
  put("header.num_lane_stages", WORD(StepInputHeader, host_rows.num_stages));
  put("header.num_lane_rows", WORD(StepInputHeader, host_rows.num_rows));
  put("header.num_state_copies", WORD(StepInputHeader, num_state_copies));
  put("row_words", WORDS(StepInputRow));
  put("row.slot", WORD(StepInputRow, slot));
  put("row.query_start", WORD(StepInputRow, query_start));
  put("row.query_len", WORD(StepInputRow, query_len));
  put("row.context_len", WORD(StepInputRow, context_len));
  put("row.flags", WORD(StepInputRow, flags));
  put("row.prompt_start", WORD(StepInputRow, prompt_start));
  put("row.sample_row", WORD(StepInputRow, sample_row));
  put("row.update", WORD(StepInputRow, update));
  put("row.delta_first", WORD(StepInputRow, delta_first));
  put("row.delta_count", WORD(StepInputRow, delta_count));
  put("row.delta_offset", WORD(StepInputRow, delta_offset));
  put("row.num_samples", WORD(StepInputRow, num_samples));
  put("row.num_appends", WORD(StepInputRow, num_appends));
  put("row.result_offset", WORD(StepInputRow, result_offset));
  put("row.result_words", WORD(StepInputRow, result_words));
  put("flag.from_device", kRowFromDevice);
  put("flag.device_length", kRowDeviceLength);
  put("flag.lane", kRowOnHost);
  put("lane_words", WORDS(HostRowEntry));
  put("lane.slot", WORD(HostRowEntry, slot));
  put("lane.position", WORD(HostRowEntry, position));
  put("copy_words", WORDS(BlockCopy));
  put("copy.source", WORD(BlockCopy, source));
  put("copy.target", WORD(BlockCopy, target));
  put("update_words", WORDS(SlotUpdate));
  put("update.slot", WORD(SlotUpdate, slot));
  put("update.temperature", WORD(SlotUpdate, temperature));
  put("update.top_p", WORD(SlotUpdate, top_p));
  put("update.min_p", WORD(SlotUpdate, min_p));
  put("update.top_k", WORD(SlotUpdate, top_k));
  put("update.seed", WORD(SlotUpdate, seed_low));
  put("update.needs", WORD(SlotUpdate, needs));
  put("update.stops", WORD(SlotUpdate, stops));
  put("update.entries", WORD(SlotUpdate, entries));
  put("update.entry_words", WORD(SlotUpdate, entry_words));
  put("parameter_words", WORDS(SlotParameters));
  put("parameter.presence_penalty", WORD(SlotParameters, presence_penalty));
  put("parameter.frequency_penalty", WORD(SlotParameters, frequency_penalty));
  put("parameter.repetition_penalty", WORD(SlotParameters, repetition_penalty));
  put("parameter.prompt_len", WORD(SlotParameters, prompt_len));
  put("parameter.min_tokens", WORD(SlotParameters, min_tokens));
  put("parameter.no_repeat_ngram", WORD(SlotParameters, no_repeat_ngram));
  put("parameter.top_logprobs", WORD(SlotParameters, top_logprobs));
  put("parameter.flags", WORD(SlotParameters, flags));
  put("parameter.processed_logprobs", kProcessedLogprobs);
  put("parameter.score_only", kScoreOnly);
  put("not_finite", kNotFinite);
  put("no_token", kNoToken);
  put("no_mask", kNoMask);
  put("deferred", kDeferred);
  put("mask_head_words", MaskBoard::kHeadWords);
  put("end_of_records", kEndOfRecords);
  put("record_needs", kRecordNeeds);
  put("max_stops", Sequence::kInlineStops);
  return d;
}

void check_request(const RequestSpec& spec) { require(spec.n >= 1 && spec.max_tokens >= 1, "n and max_tokens must be at least 1"); }

}  // namespace

py::handle to_python(FinishReason reason) { return finish_members[static_cast<size_t>(reason)]; }

py::handle record_kind(uint32_t kind) { return kind <= kLogits ? record_members[kind] : Py_None; }

void bind_wire(py::module_& m) {
  make_enum(m, "IntFlag", "Need",
            {{"temperature", kNeedTemperature},
             {"filters", kNeedFilters},
             {"penalties", kNeedPenalties},
             {"bias", kNeedBias},
             {"logprobs", kNeedLogprobs},
             {"mask", kNeedMask},
             {"drafts", kNeedDrafts},
             {"vector", kNeedVector},
             {"mean", kNeedMean},
             {"logits", kNeedLogits}});
  make_enum(m, "IntEnum", "EntryKind",
            {{"token_history", kTokenHistory},
             {"bias", kBias},
             {"banned_words", kBannedWords},
             {"grammar", kGrammar},
             {"adapter", kAdapter},
             {"parameters", kParameters},
             {"end_tokens", kEndTokens},
             {"allowed_tokens", kAllowedTokens},
             {"named_tokens", kNamedTokens}});
  const py::object records = make_enum(m, "IntEnum", "RecordKind",
                                       {{"logprobs", kLogprobs}, {"vector", kVector}, {"logits", kLogits}});
  record_members[kLogprobs] = py::object(records.attr("logprobs")).release().ptr();
  record_members[kLogits] = py::object(records.attr("logits")).release().ptr();
  record_members[kVector] = py::object(records.attr("vector")).release().ptr();
  const py::object finish = make_enum(m, "IntEnum", "FinishReason", kFinishReasons);
  for (const auto& [name, value] : kFinishReasons) finish_members[value] = py::object(finish.attr(name)).release().ptr();
  m.attr("STEP_INPUT_LAYOUT") = step_input_layout();

  auto sampling = bind_record<SamplingState>(m, "SamplingState", [](const SamplingState&) {});
  make_readable(sampling);
  sampling.def_property_readonly("needs", &SamplingState::needs);

  py::class_<MaskChannel, std::shared_ptr<MaskChannel>>(m, "MaskChannel")
      .def(py::init([](int32_t mask_words) {
             require(mask_words >= 1, "mask_words must be at least 1");
             return std::make_shared<MaskChannel>(mask_words);
           }),
           py::arg("mask_words"))
      .def_property_readonly("address", [](const MaskChannel& c) { return reinterpret_cast<uintptr_t>(c.words.data()); })
      .def(
          "write",
          [](MaskChannel& c, int32_t position, bool allows_all, std::vector<int32_t> forced) {
            c.position = position;
            c.allows_all = allows_all;
            c.forced = std::move(forced);
          },
          py::arg("position"), py::arg("allows_all") = false, py::arg("forced") = std::vector<int32_t>())
      .def("post", &MaskChannel::post, NoGil());

  bind_record<RequestExtras>(m, "RequestExtras", [](const RequestExtras&) {});
  bind_record<RequestSpec>(m, "RequestSpec", check_request).def_readwrite("delay_ns", &RequestSpec::delay_ns);
}

}  // namespace asyncengine
