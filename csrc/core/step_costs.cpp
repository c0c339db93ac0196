#include "core/step_costs.h"

#include <algorithm>

namespace asyncengine {
namespace {

using Point = StepCosts::Point;

constexpr double kGain = 1.0 / 16;              // of one step's error, what is learned
constexpr double kLeastError = 0.5, kMostError = 2;
constexpr int32_t kFewSteps = 64;               // that say what decode takes
constexpr double kLeastFactor = 1.0 / 64, kMostFactor = 64;

// Below the first point it takes what it takes there: weights are read all the same. Beyond the last one time grows as the
// tokens do.
Point at(const std::vector<Point>& points, int32_t tokens) {
  const auto above = std::ranges::lower_bound(points, tokens, {}, &Point::tokens);
  if (above == points.begin()) return points.front();
  const Point& below = *(above - 1);
  if (above == points.end()) {
    const double more = static_cast<double>(tokens) / below.tokens;
    return {tokens, below.base_ns * more, below.context_ns * more};
  }
  const double share = static_cast<double>(tokens - below.tokens) / (above->tokens - below.tokens);
  return {tokens, below.base_ns + share * (above->base_ns - below.base_ns),
          below.context_ns + share * (above->context_ns - below.context_ns)};
}

// A token of context is read once for each row that attends to it, however many rows there are.
double read_ns(const std::vector<Point>& decode, int32_t rows) {
  return at(decode, std::min(rows, decode.back().tokens)).context_ns;
}

double error_of(int64_t predicted_ns, int64_t took_ns) {
  return std::clamp(static_cast<double>(took_ns) / static_cast<double>(predicted_ns), kLeastError, kMostError) - 1;
}

void correct(double& factor, double error, double share) {
  factor = std::clamp(factor * (1 + kGain * share * error), kLeastFactor, kMostFactor);
}

}  // namespace

int64_t StepCosts::decode_ns(int32_t rows, int64_t attended) const {
  if (!known()) return 0;
  const double read = read_ns(decode_, rows) * static_cast<double>(attended);
  return static_cast<int64_t>(factors_.decode * (at(decode_, rows).base_ns + read));
}

int64_t StepCosts::hybrid_ns(int32_t rows, int32_t host_tokens, int64_t attended, double exchange_ns) const {
  if (!known()) return 0;
  const double read = read_ns(decode_, rows) * static_cast<double>(attended);  // tokens of host rows attend to nothing
  return static_cast<int64_t>(factors_.hybrid * factors_.decode * (at(decode_, rows + host_tokens).base_ns + read + exchange_ns));
}

int64_t StepCosts::mixed_ns(int32_t tokens, int32_t rows, int64_t attended, double chunks_ns) const {
  if (!known()) return 0;
  const double read = rows == 0 ? 0 : read_ns(decode_, rows) * static_cast<double>(attended);
  return static_cast<int64_t>(factors_.rest * (at(prompt_, tokens).base_ns + read) + factors_.attention * chunks_ns);
}

double StepCosts::attention_ns(int32_t tokens, int64_t context) const {
  if (!known()) return 0;
  return at(prompt_, tokens).context_ns * (static_cast<double>(context) + 0.5 * tokens);
}

int64_t StepCosts::recompute_ns(int64_t tokens, int64_t context) const {
  if (!known() || tokens <= 0) return 0;
  const auto chunk = static_cast<int32_t>(std::min<int64_t>(tokens, prompt_.back().tokens));
  const double steps = static_cast<double>(tokens) / chunk;
  const double middle = static_cast<double>(context) + 0.5 * static_cast<double>(tokens);
  const Point of_chunk = at(prompt_, chunk);
  return static_cast<int64_t>(steps * (factors_.rest * of_chunk.base_ns + factors_.attention * of_chunk.context_ns * middle));
}

void StepCosts::learn_decode(int64_t predicted_ns, int64_t took_ns) {
  if (predicted_ns <= 0) return;
  const double before = factors_.decode;
  correct(factors_.decode, error_of(predicted_ns, took_ns), 1);
  // Steps with host rows ran before any without: the factor of all steps was taken for theirs, and their product stays the same.
  if (num_decode_steps_ < kFewSteps && factors_.hybrid != 1) factors_.hybrid *= before / factors_.decode;
  num_decode_steps_ = std::min(num_decode_steps_ + 1, kFewSteps);
}

void StepCosts::learn_hybrid(int64_t predicted_ns, int64_t took_ns) {
  if (predicted_ns > 0) correct(factors_.hybrid, error_of(predicted_ns, took_ns), 1);
}

void StepCosts::learn_mixed(int64_t predicted_ns, double chunks_ns, int64_t took_ns) {
  if (predicted_ns <= 0) return;
  const double error = error_of(predicted_ns, took_ns);
  const double share = std::min(1.0, factors_.attention * chunks_ns / static_cast<double>(predicted_ns));
  correct(factors_.attention, error, share);
  correct(factors_.rest, error, 1 - share);
}

}  // namespace asyncengine
