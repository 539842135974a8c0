// Looking through /proc and removing a directory with system calls alone: no memory is taken and no
// lock, so that a process which was forked from one with threads may do it. Free functions, safe on
// any thread.
#ifndef WEFT_STORE_INTERNAL_LAUNCH_PROC_H_
#define WEFT_STORE_INTERNAL_LAUNCH_PROC_H_

namespace weft::launch {

// Calls `visit` for every process but this one that carries `tag` in its environment (kTagVariable),
// zombies excepted. Processes that cannot be looked into are left out.
void visit_tagged(const char* tag, void (*visit)(int pid, void* context), void* context);

// Removes `path` and what is below it, as far as possible; links are removed and not followed.
void remove_tree(const char* path);

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_PROC_H_
