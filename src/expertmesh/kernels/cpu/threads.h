/* Threads of the OpenMP runtime that torch has loaded, by its own entry points: nothing is linked, so there is never
 * a second runtime. */
#ifndef EXPERTMESH_THREADS_H
#define EXPERTMESH_THREADS_H

#include <stdint.h>

typedef void (*Body)(void *data, int64_t thread, int64_t threads);

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    void (*barrier)(void);
    int (*thread)(void);
    int (*threads)(void);
} Runtime;

extern Runtime expertmesh_runtime;

typedef struct {
    Body body;
    void *data;
} Task;

static void run_task(void *given) {
    const Task *task = given;
    task->body(task->data, expertmesh_runtime.thread(), expertmesh_runtime.threads());
}

/* Runs a body on up to so many threads, and waits for all. One thread needs no runtime, as in a process that was
 * forked. */
static void together(Body body, void *data, int64_t threads) {
    Task task = {body, data};
    if (threads > 1 && expertmesh_runtime.parallel) expertmesh_runtime.parallel(run_task, &task, (unsigned)threads, 0);
    else body(data, 0, 1);
}

/* The next of the items that threads share. */
static inline int64_t take(int64_t *taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

/* A barrier for the threads of a body. */
static inline void meet(int64_t threads) {
    if (threads > 1) expertmesh_runtime.barrier();
}

#endif
