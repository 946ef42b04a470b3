/* The OpenMP runtime that torch has loaded; see `threads.h`. */
#include "threads.h"

Runtime expertmesh_runtime;

/* GOMP_parallel, GOMP_barrier, omp_get_thread_num, omp_get_num_threads. Without this call everything runs on one
 * thread. */
void expertmesh_use_threads(void *parallel, void *barrier, void *thread, void *threads) {
    expertmesh_runtime.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    expertmesh_runtime.barrier = (void (*)(void))barrier;
    expertmesh_runtime.thread = (int (*)(void))thread;
    expertmesh_runtime.threads = (int (*)(void))threads;
}
