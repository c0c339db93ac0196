// A directory of files, one for each block of KV.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/digest.h"
#include "platform/disk/file_operations.h"

namespace asyncengine {

enum class DiskResult : uint8_t {
  kDone,
  kMissing,  // there is no such file
  kCorrupt,  // it is no file, or not what was written: what it holds may be in the target, and counts for nothing
  kFailed,   // the disk, or its file system, refuses
};

struct BlockLayout {
  std::string fingerprint;  // of model and layout: blocks of another one are other files
  size_t block_bytes = 0;
  int block_tokens = 0;
};

// PATH/FINGERPRINT/SHARD/KEY.kv: a header, the tokens, the KV. A file is written under another name and then renamed, so
// that readers see whole files, and several stores, also of several processes, may share a directory. Nothing is synced: a
// file that a loss of power left incomplete fails its checksum, costs what a miss costs, and a sync of each block would cost
// more than all such files. Files and folders are the user's alone, because KV is as private as the text it is made of; a
// user who may rename what is in PATH could still put another folder there.
//
// Every call waits for the disk. All but the constructor's may come from several threads.
class BlockDirectory {
 public:
  // Throws std::runtime_error with the path in it: the directory cannot be made, written, or is open to other users.
  BlockDirectory(const std::string& path, const BlockLayout& layout, const FileOperations& files);
  ~BlockDirectory();
  BlockDirectory(const BlockDirectory&) = delete;
  BlockDirectory& operator=(const BlockDirectory&) = delete;

  // Bytes that a block takes, in whole pages.
  int64_t bytes_per_block() const;
  DiskResult write(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens, const std::byte* data);
  // kDone: the file has this key, this parent, these tokens, and all of it is as it was written.
  DiskResult read(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens, std::byte* target);
  bool remove(const BlockKey& key);  // false: the file may still be there

  struct Found {
    BlockKey key;
    int64_t used_ns;  // since 1970
  };
  struct Scan {
    std::vector<Found> blocks;  // the one used last comes first
    int64_t broken = 0;         // files of another length, which were removed
  };
  // Looks at every file, until `stop`. Removes what a crash left, unless another store uses the directory as well.
  Scan scan(const std::atomic<bool>& stop);

 private:
  std::string shard(uint8_t number) const { return folder_ + "/" + hex({&number, 1}); }
  std::string path(const BlockKey& key) const { return shard(key.bytes[0]) + "/" + hex(key.bytes) + ".kv"; }
  std::vector<std::byte> head(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens) const;
  void check_access() const;
  int create(const std::string& path, const std::string& shard);
  int open_file(const std::string& path, int flags) const;
  bool transfer(int fd, std::span<const std::byte> data, size_t offset);
  void scan_shard(const std::string& shard, Scan& scan);

  const FileOperations& files_;
  Digest layout_;
  size_t block_bytes_, head_bytes_;
  std::string folder_;  // of the fingerprint
  std::string mark_;    // of this store, in the names of its temporary files
  std::atomic<uint64_t> num_temporary_{0};
  int lock_fd_ = -1;    // locked, shared, as long as a store uses the folder
  bool alone_ = false;
};

}  // namespace asyncengine
