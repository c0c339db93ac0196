// The disk store as the host tier asks for it.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "core/tier/block_disk.h"
#include "platform/disk/disk_store.h"

namespace asyncengine {

class DiskBlocks final : public BlockDisk {
 public:
  DiskBlocks(const DiskStore::Config& config, std::function<void()> notify)
      : fingerprint_(config.layout.fingerprint), store_(new DiskStore(config, std::move(notify))) {}
  // False: a thread of the store hangs. Then the memory of blocks must never be freed.
  bool close(std::chrono::nanoseconds limit) { return DiskStore::dispose(store_.release(), limit); }

  BlockKey root(uint64_t salt) const override { return root_key(fingerprint_, salt); }
  bool contains(const BlockKey& key) const override { return store_->contains(key); }
  bool put(const BlockName& name, std::span<const int32_t> tokens, const std::byte* data, uint64_t ticket) override {
    return store_->put(name.key, name.parent, tokens, data, ticket);
  }
  bool get(const BlockName& name, std::span<const int32_t> tokens, std::byte* target, uint64_t ticket) override {
    return store_->get(name.key, name.parent, tokens, target, ticket);
  }
  void leave_alone(DiskCalls calls) override { store_->leave_alone(calls); }
  void take_completions(const Visit& visit) override {
    store_->take_completions([&](uint64_t ticket, DiskResult result) { visit(ticket, result == DiskResult::kDone); });
  }
  DiskStore::Counters counters() const { return store_->counters(); }

 private:
  std::string fingerprint_;
  std::unique_ptr<DiskStore> store_;
};

}  // namespace asyncengine
