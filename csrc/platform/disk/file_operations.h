// The part of POSIX that stores blocks, as a table of function pointers: tests put faults into it.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace asyncengine {

// Signatures, results and errno are POSIX's. A call may fail, be short or hang at any time.
struct FileOperations {
  int (*open)(const char* path, int flags, mode_t mode);
  int (*fstat)(int fd, struct stat* status);
  ssize_t (*pread)(int fd, void* target, size_t bytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* data, size_t bytes, off_t offset);
  int (*close)(int fd);
  int (*rename)(const char* from, const char* to);
  int (*unlink)(const char* path);
  int (*mkdir)(const char* path, mode_t mode);
  int (*touch)(int fd);   // the file was used now
  int64_t (*now_ns)();    // of a steady clock
};

const FileOperations& system_files();

}  // namespace asyncengine
