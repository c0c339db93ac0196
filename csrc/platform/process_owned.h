// Objects that are freed in the process that made them, and in no fork of it.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace asyncengine {

// A deleter. A fork has copies of what threads use and not the threads: a destructor waits there for ever where it destroys a
// condition variable that one of them slept on, or calls a driver whose lock one of them held. Python frees such a copy when
// it collects garbage, and it may do so between the fork and the exec of a new process, while the parent waits for the exec.
// The fork leaks the object instead.
template <class Free>
class FreedInItsProcess {
 public:
  template <class T>
  void operator()(T* object) const {
    if (getpid() == process_) Free()(object);
  }

 private:
  pid_t process_ = getpid();
};

// std::make_shared for such objects.
template <class T, class... Args>
std::shared_ptr<T> make_process_owned(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), FreedInItsProcess<std::default_delete<T>>());
}

}  // namespace asyncengine
