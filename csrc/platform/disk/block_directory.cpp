#include "platform/disk/block_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string_view>

namespace asyncengine {
namespace {

constexpr int64_t kPage = 4096;
constexpr int kNoFile = ENXIO;  // as open() says of a socket
constexpr mode_t kFileMode = 0600, kFolderMode = 0700;
constexpr std::string_view kSuffix = ".kv", kTemporarySuffix = ".tmp";

// The head at the beginning of a file; the tokens and the KV follow.
struct Head {
  std::array<char, 8> magic = {'K', 'V', 'B', 'L', 'O', 'C', 'K', '1'};
  uint64_t num_tokens = 0, block_bytes = 0;
  Digest layout{}, key{}, parent{};
  uint64_t checksum = 0;  // of the KV, with the checksum of all that comes before it as the seed
};
static_assert(sizeof(Head) == 128 && std::is_trivially_copyable_v<Head>);

Digest digest_of(const BlockLayout& layout) {
  const std::array<uint64_t, 3> sizes = {1 /* version */, layout.block_bytes, static_cast<uint64_t>(layout.block_tokens)};
  Sha256 hash;
  hash.update(sizes.data(), sizeof(sizes));
  hash.update(layout.fingerprint.data(), layout.fingerprint.size());
  return hash.finish();
}

uint64_t random_word() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

std::runtime_error failure(const std::string& path, const std::string& why) {
  return std::runtime_error("cannot keep KV blocks in " + path + ": " + why);
}

std::optional<BlockKey> key_of(std::string_view name) {
  BlockKey key;
  if (name.size() != 2 * key.bytes.size() + kSuffix.size() || !name.ends_with(kSuffix)) return std::nullopt;
  for (size_t i = 0; i < 2 * key.bytes.size(); ++i) {
    const size_t digit = std::string_view("0123456789abcdef").find(name[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    key.bytes[i / 2] = static_cast<uint8_t>(key.bytes[i / 2] << 4 | digit);
  }
  return key;
}

int64_t used_ns(const struct stat& status) {
#ifdef __APPLE__
  const timespec& time = status.st_mtimespec;
#else
  const timespec& time = status.st_mtim;
#endif
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Bytes read, fewer at the end of the file; -1: errno says why.
int64_t read_all(const FileOperations& files, int fd, std::byte* target, size_t bytes, size_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = files.pread(fd, target + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<int64_t>(done);
}

}  // namespace

BlockDirectory::BlockDirectory(const std::string& path, const BlockLayout& layout, const FileOperations& files)
    : files_(files),
      layout_(digest_of(layout)),
      block_bytes_(layout.block_bytes),
      head_bytes_(sizeof(Head) + static_cast<size_t>(layout.block_tokens) * sizeof(int32_t)),
      folder_(path + "/" + hex(std::span(layout_).first(16))) {
  const uint64_t mark = random_word();
  mark_.append(".").append(hex({reinterpret_cast<const uint8_t*>(&mark), sizeof(mark)})).append("-");
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    files_.mkdir(path.substr(0, end).c_str(), kFolderMode);  // if one cannot be made, the last one says so
  }
  for (const std::string& made : {path, folder_}) {
    if (files_.mkdir(made.c_str(), kFolderMode) != 0 && errno != EEXIST) throw failure(path, std::strerror(errno));
  }
  check_access();
  lock_fd_ = open_file(folder_ + "/lock", O_RDWR | O_CREAT);
  if (lock_fd_ < 0) throw failure(folder_ + "/lock", std::strerror(errno));
  // No lock is waited for: at worst a store that starts removes a temporary file of another one, whose write then fails.
  alone_ = ::flock(lock_fd_, LOCK_EX | LOCK_NB) == 0;
  if (!alone_) (void)::flock(lock_fd_, LOCK_SH | LOCK_NB);
}

BlockDirectory::~BlockDirectory() { files_.close(lock_fd_); }

// Throws unless the folder is closed to other users: a user who may write here could hand out KV of another text.
void BlockDirectory::check_access() const {
  struct stat status{};
  if (::lstat(folder_.c_str(), &status) != 0) throw failure(folder_, std::strerror(errno));
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    throw failure(folder_, "it must be a directory of the user that runs this, closed to others (mode 0700)");
  }
}

int64_t BlockDirectory::bytes_per_block() const {
  return (static_cast<int64_t>(head_bytes_ + block_bytes_) + kPage - 1) / kPage * kPage;
}

std::vector<std::byte> BlockDirectory::head(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens) const {
  Head head;
  head.num_tokens = tokens.size();
  head.block_bytes = block_bytes_;
  head.layout = layout_;
  head.key = key.bytes;
  head.parent = parent.bytes;
  std::vector<std::byte> bytes(head_bytes_);
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::memcpy(bytes.data() + sizeof(head), tokens.data(), std::min(tokens.size_bytes(), head_bytes_ - sizeof(head)));
  return bytes;
}

DiskResult BlockDirectory::write(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens,
                                 const std::byte* data) {
  std::vector<std::byte> start = head(key, parent, tokens);
  const uint64_t checksum = checksum64(data, block_bytes_, checksum64(start.data(), start.size(), 0));
  std::memcpy(start.data() + offsetof(Head, checksum), &checksum, sizeof(checksum));
  const std::string name = path(key);
  const std::string temporary = name + mark_ + std::to_string(num_temporary_++) + std::string(kTemporarySuffix);
  const int fd = create(temporary, shard(key.bytes[0]));
  if (fd < 0) return DiskResult::kFailed;
  const bool written = transfer(fd, start, 0) && transfer(fd, {data, block_bytes_}, start.size());
  const bool closed = files_.close(fd) == 0;  // some file systems say only now that there is no room
  if (written && closed && files_.rename(temporary.c_str(), name.c_str()) == 0) return DiskResult::kDone;
  files_.unlink(temporary.c_str());
  return DiskResult::kFailed;
}

// Opens a regular file and nothing else: to open a FIFO, or to read a device, may last for ever. -1: errno says why.
int BlockDirectory::open_file(const std::string& path, int flags) const {
  const int fd = files_.open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, kFileMode);
  if (fd < 0) return fd;
  struct stat status{};
  const bool known = files_.fstat(fd, &status) == 0;
  if (known && S_ISREG(status.st_mode)) return fd;
  const int error = known ? kNoFile : errno;
  files_.close(fd);
  errno = error;
  return -1;
}

// The folders come with their first file, and again after somebody has emptied the directory.
int BlockDirectory::create(const std::string& path, const std::string& shard) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  const int fd = files_.open(path.c_str(), kFlags, kFileMode);
  if (fd >= 0 || errno != ENOENT) return fd;
  files_.mkdir(folder_.c_str(), kFolderMode);
  files_.mkdir(shard.c_str(), kFolderMode);
  return files_.open(path.c_str(), kFlags, kFileMode);
}

bool BlockDirectory::transfer(int fd, std::span<const std::byte> data, size_t offset) {
  while (!data.empty()) {
    const ssize_t written = files_.pwrite(fd, data.data(), data.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    data = data.subspan(static_cast<size_t>(written));
    offset += static_cast<size_t>(written);
  }
  return true;
}

DiskResult BlockDirectory::read(const BlockKey& key, const BlockKey& parent, std::span<const int32_t> tokens, std::byte* target) {
  const int fd = open_file(path(key), O_RDONLY);
  if (fd < 0) {
    const bool no_file = errno == kNoFile || errno == ELOOP;  // the latter of a link
    return errno == ENOENT ? DiskResult::kMissing : no_file ? DiskResult::kCorrupt : DiskResult::kFailed;
  }
  std::vector<std::byte> found(head_bytes_);
  const int64_t head_read = read_all(files_, fd, found.data(), head_bytes_, 0);
  const int64_t kv_read = head_read < 0 ? -1 : read_all(files_, fd, target, block_bytes_, head_bytes_);
  if (kv_read >= 0) files_.touch(fd);
  files_.close(fd);
  if (kv_read < 0) return DiskResult::kFailed;
  if (head_read + kv_read != static_cast<int64_t>(head_bytes_ + block_bytes_)) return DiskResult::kCorrupt;

  const std::vector<std::byte> wanted = head(key, parent, tokens);
  uint64_t checksum;
  std::memcpy(&checksum, found.data() + offsetof(Head, checksum), sizeof(checksum));
  std::fill_n(found.begin() + offsetof(Head, checksum), sizeof(checksum), std::byte{});
  const bool right = found == wanted && checksum == checksum64(target, block_bytes_, checksum64(found.data(), found.size(), 0));
  return right ? DiskResult::kDone : DiskResult::kCorrupt;
}

bool BlockDirectory::remove(const BlockKey& key) { return files_.unlink(path(key).c_str()) == 0 || errno == ENOENT; }

BlockDirectory::Scan BlockDirectory::scan(const std::atomic<bool>& stop) {
  Scan scan;
  for (int number = 0; number < 256 && !stop.load(std::memory_order_relaxed); ++number) {
    scan_shard(shard(static_cast<uint8_t>(number)), scan);
  }
  std::sort(scan.blocks.begin(), scan.blocks.end(), [](const Found& a, const Found& b) { return a.used_ns > b.used_ns; });
  if (alone_) (void)::flock(lock_fd_, LOCK_SH | LOCK_NB);
  return scan;
}

void BlockDirectory::scan_shard(const std::string& shard, Scan& scan) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(shard.c_str()), ::closedir);
  if (folder == nullptr) return;
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    const std::string path = shard + "/" + entry->d_name;
    if (name.ends_with(kTemporarySuffix)) {
      if (alone_ && name.find(mark_) == std::string_view::npos) files_.unlink(path.c_str());
      continue;
    }
    const std::optional<BlockKey> key = key_of(name);
    struct stat status{};
    if (!key || ::lstat(path.c_str(), &status) != 0) continue;
    if (S_ISREG(status.st_mode) && status.st_size == static_cast<off_t>(head_bytes_ + block_bytes_)) {
      scan.blocks.push_back({*key, used_ns(status)});
    } else {
      files_.unlink(path.c_str());
      ++scan.broken;
    }
  }
}

}  // namespace asyncengine
