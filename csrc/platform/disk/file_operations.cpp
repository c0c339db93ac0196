#include "platform/disk/file_operations.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace asyncengine {
namespace {

int open_file(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
int stat_file(int fd, struct stat* status) { return ::fstat(fd, status); }
int touch_file(int fd) { return ::futimens(fd, nullptr); }
int64_t steady_now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

const FileOperations& system_files() {
  static const FileOperations files = {open_file, stat_file, ::pread, ::pwrite,   ::close,
                                       ::rename,  ::unlink,  ::mkdir, touch_file, steady_now};
  return files;
}

}  // namespace asyncengine
