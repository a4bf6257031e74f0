// A signal by which somebody asks a process what its ranks wait for (moe_triton/runtime/dump_signal.py). Python's own
// handlers run where the main thread is in Python, and one that hangs in native code, ours or not, is what it is for.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

namespace {

int asked_at = -1;  // a pipe's end that a thread of Python's reads the other one of
pid_t owner = 0;

// Only what is safe in a handler. A forked child has the pipe, and no thread that reads it.
void Ask(int) {
    const int before = errno;
    if (getpid() == owner) {
        const char byte = 1;
        (void)!write(asked_at, &byte, 1);  // a pipe that is full has been asked already
    }
    errno = before;
}

}  // namespace

extern "C" {

// 0: from now on the signal writes to that end; 1: it has a handler, or is ignored; -1: there is no such signal.
int moe_watch_signal(int number, int write_end) {
    struct sigaction now{};
    if (sigaction(number, nullptr, &now) != 0) return -1;
    const bool is_of_parent = now.sa_handler == Ask && owner != getpid();
    if (!is_of_parent && (now.sa_handler != SIG_DFL || (now.sa_flags & SA_SIGINFO) != 0)) return 1;
    asked_at = write_end;
    owner = getpid();
    struct sigaction wanted{};
    wanted.sa_handler = Ask;
    wanted.sa_flags = SA_RESTART;
    sigemptyset(&wanted.sa_mask);
    return sigaction(number, &wanted, nullptr) == 0 ? 0 : -1;
}

}  // extern "C"
