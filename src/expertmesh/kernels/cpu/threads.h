/* Threads of the OpenMP runtime that torch has loaded, by its own entry points: nothing is linked, so there is never a second runtime. */
#ifndef EXPERTMESH_THREADS_H
#define EXPERTMESH_THREADS_H

#include <stdint.h>

typedef void (*Body)(void *data, int64_t thread, int64_t threads);

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    void (*barrier)(void);
    int (*thread)(void);
    int (*threads)(void);
} runtime;

/* GOMP_parallel, GOMP_barrier, omp_get_thread_num, omp_get_num_threads. Without this call everything runs on one thread. */
void expertmesh_use_threads(void *parallel, void *barrier, void *thread, void *threads) {
    runtime.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    runtime.barrier = (void (*)(void))barrier;
    runtime.thread = (int (*)(void))thread;
    runtime.threads = (int (*)(void))threads;
}

typedef struct {
    Body body;
    void *data;
} Task;

static void run_task(void *given) {
    const Task *task = given;
    task->body(task->data, runtime.thread(), runtime.threads());
}

/* Runs a body on up to so many threads, and waits for all. One thread needs no runtime, as in a process that was forked. */
static void together(Body body, void *data, int64_t threads) {
    Task task = {body, data};
    if (threads > 1 && runtime.parallel) runtime.parallel(run_task, &task, (unsigned)threads, 0);
    else body(data, 0, 1);
}

/* A barrier for the threads of a body. */
static inline void meet(int64_t threads) {
    if (threads > 1) runtime.barrier();
}

#endif
