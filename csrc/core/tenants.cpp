#include "core/tenants.h"

#include <cassert>

namespace asyncengine {

Tenant* Tenants::find(uint64_t id) {
  if (id == 0) return nullptr;
  Tenant& tenant = tenants_[id];
  tenant.id = id;
  return &tenant;
}

Sequence& FairQueue::front() const {
  if (within_.empty()) return rest_.front().waiting.front();
  Sequence& first = within_.front().waiting.front();
  if (rest_.empty()) return first;
  Sequence& other = rest_.front().waiting.front();
  return other.request->priority < first.request->priority && runs_before(&other, &first) ? other : first;
}

const Sequence* FairQueue::first_within() const {
  if (within_.empty() || &front() != &within_.front().waiting.front()) return nullptr;
  return &front();
}

void FairQueue::push(Sequence* sequence) {
  Tenant& tenant = tenant_of(*sequence);
  tenant.waiting.push(sequence);
  ++size_;
  if (!tenant.queued || &tenant.waiting.front() == sequence) place(tenant);
}

void FairQueue::remove(const Sequence* sequence) {
  Tenant& tenant = tenant_of(*sequence);
  const bool first = &tenant.waiting.front() == sequence;
  tenant.waiting.remove(sequence);
  --size_;
  if (first) place(tenant);
}

// Puts a tenant in its place after its first waiting request or its share has changed.
void FairQueue::place(Tenant& tenant) {
  if (&tenant != &nobody_) {
    const bool above = tenant.held > share_;
    num_above_ += above - tenant.above;
    tenant.above = above;
    if (!shared() || tenant.blocks + tenant.wanted <= block_share()) tenant.wanted = 0;
  }
  if (tenant.queued) heap(tenant).remove(&tenant);
  tenant.queued = !tenant.waiting.empty();
  if (!tenant.queued) return;
  tenant.within = &tenant == &nobody_ || (tenant.held < share_ && tenant.wanted == 0);
  heap(tenant).push(&tenant);
}

void FairQueue::enter(const Request& request) {
  Tenant& tenant = tenant_of(request);
  tenant.sequences += request.sequences.size();
  tenant.waiting.make_room(tenant.sequences);
  if (&tenant == &nobody_ || tenant.requests++ > 0) return;
  make_room(tenants_.size() + 2);  // nobody_ may be there too
  tenant.list_place = tenants_.size();
  tenants_.push_back(&tenant);
  share_again();
}

void FairQueue::leave(const Request& request) {
  Tenant& tenant = tenant_of(request);
  tenant.sequences -= request.sequences.size();
  if (&tenant == &nobody_ || --tenant.requests > 0) return;
  assert(tenant.held == 0 && !tenant.queued);
  tenants_.back()->list_place = tenant.list_place;
  tenants_[tenant.list_place] = tenants_.back();
  tenants_.pop_back();
  share_again();
}

// With more tenants than slots the share stays one: this walks over no more of them than that. A tenant that is alone again
// steps back for nobody.
void FairQueue::share_again() {
  const auto count = static_cast<int32_t>(std::max<size_t>(1, tenants_.size()));
  const int32_t share = std::max(1, num_slots_ / count);
  if (share == share_ && count > 1) return;
  share_ = share;
  for (Tenant* tenant : tenants_) place(*tenant);
}

void FairQueue::took_slot(const Sequence& sequence) {
  ++held_;
  Tenant& tenant = tenant_of(sequence);
  ++tenant.held;
  place(tenant);
}

void FairQueue::gives_slot(const Sequence& sequence, int32_t blocks) {
  --held_;
  Tenant& tenant = tenant_of(sequence);
  --tenant.held;
  tenant.blocks = tenant.held == 0 ? 0 : std::max<int64_t>(0, tenant.blocks - blocks * Tenant::kBlock);
  place(tenant);
}

int32_t FairQueue::count_waiting(int32_t most) const {
  if (within_.empty()) return 0;
  const int32_t priority = within_.front().waiting.front().request->priority;
  int32_t count = 0;
  for (const Tenant* tenant : within_.members()) {
    count += tenant != &nobody_ && tenant->waiting.front().request->priority <= priority;
    if (count >= most) break;
  }
  return count;
}

void FairQueue::step_back(Tenant& tenant, int64_t blocks) {
  tenant.wanted = blocks;
  place(tenant);
}

}  // namespace asyncengine
