/*
 * The fast tier of a sampler: functions of a driver called at absolute deadlines, without the GIL.
 *
 * What is called, with which arguments, and where in what the driver wrote a value lies, Python says
 * once (_plan.py), after the vendor's binding has found library, devices and sensors. A thread then
 * calls all devices in turn at each deadline and writes one record for each into that device's ring:
 * one producer, one consumer, and a counter of what did not fit. Python takes the records as Arrow's
 * buffers a few times a second.
 *
 * What one sample of a device touches lies in one block of memory: between two samples the training
 * has had the caches, and what is not touched need not be fetched again.
 *
 * A call that does not return holds up the devices behind it. relieve(), called from outside, gives
 * those to a new thread; the device that blocked stays with its own thread from then on.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "_fast_read.h"

#define MAX_CAPACITY (1 << 24)
#define LONGEST_WAIT_NS (3600 * SECOND)
#define LONGEST_PERIOD_NS (100000000 * SECOND)
#define MAX_DEVICES 1024
#define LINE 64 /* bytes of a cache line */
#define ALIGNED(bytes) (((bytes) + 15) & ~(size_t)15)

/* ------------------------------------------------------------------ threads */

static void
wait_until(Loop *loop, int64_t deadline_ns)
{
    struct timespec at = {deadline_ns / SECOND, deadline_ns % SECOND};
    while (!loop->stopping && now_ns(CLOCK_MONOTONIC) < deadline_ns)
        pthread_cond_timedwait(&loop->wake, &loop->lock, &at);
}

static void *
work(void *argument)
{
    Worker *worker = argument;
    Loop *loop = worker->loop;
    pthread_mutex_lock(&loop->lock);
    for (;;) {
        wait_until(loop, worker->deadline_ns);
        if (loop->stopping)
            break;
        int64_t tick_ns = now_ns(CLOCK_MONOTONIC), begun_ns, period_ns = loop->period_ns;
        bool any = false;
        for (Py_ssize_t i = 0; i < loop->device_count && !loop->stopping; i++) {
            Device *device = &loop->devices[i];
            if (device->owner != worker->number || device->lost)
                continue;
            worker->device = (int)i;
            worker->since_ns = now_ns(CLOCK_MONOTONIC);
            pthread_mutex_unlock(&loop->lock);
            sample(loop, device, &begun_ns);
            pthread_mutex_lock(&loop->lock);
            worker->device = -1;
            if (device->lost)
                continue;
            any = true;
            int64_t delay_ns = begun_ns - worker->deadline_ns;
            count(loop->jitter, delay_ns);
            device->late += delay_ns > period_ns / 2;
            if (!device->samples++)
                device->first_ns = begun_ns;
            device->last_ns = begun_ns;
        }
        int64_t after_ns = now_ns(CLOCK_MONOTONIC);
        if (!any)
            break;
        loop->ticks++;
        count(loop->cost, after_ns - tick_ns);
        worker->deadline_ns += loop->period_ns;
        if (worker->deadline_ns <= after_ns) {
            int64_t missed = (after_ns - worker->deadline_ns) / loop->period_ns + 1;
            worker->deadline_ns += missed * loop->period_ns;
            for (Py_ssize_t i = 0; i < loop->device_count; i++)
                if (loop->devices[i].owner == worker->number && !loop->devices[i].lost)
                    loop->devices[i].dropped += missed;
        }
    }
    worker->ended = true;
    pthread_cond_broadcast(&loop->wake);
    pthread_mutex_unlock(&loop->lock);
    return NULL;
}

/* Start a thread whose first deadline this is; with the lock. NULL when there can be none. */
static Worker *
employ(Loop *loop, int64_t deadline_ns)
{
    Worker *worker = calloc(1, sizeof *worker);
    if (worker == NULL)
        return NULL;
    worker->loop = loop;
    worker->number = loop->worker_count;
    worker->device = -1;
    worker->deadline_ns = deadline_ns;
    if (pthread_create(&worker->thread, NULL, work, worker)) {
        free(worker);
        return NULL;
    }
    loop->worker_count++;
    worker->next = loop->workers;
    loop->workers = worker;
    return worker;
}

static PyObject *
loop_start(Loop *self, PyObject *args)
{
    long long first_ns;
    if (!PyArg_ParseTuple(args, "L", &first_ns))
        return NULL;
    int64_t now = now_ns(CLOCK_MONOTONIC);
    if (first_ns < now - LONGEST_WAIT_NS || first_ns > now + LONGEST_WAIT_NS) {
        PyErr_SetString(PyExc_ValueError, "the first deadline is within an hour of now");
        return NULL;
    }
    pthread_mutex_lock(&self->lock);
    bool refused = self->worker_count || self->stopping || employ(self, first_ns) == NULL;
    pthread_mutex_unlock(&self->lock);
    if (refused) {
        PyErr_SetString(PyExc_RuntimeError, "no thread can be started");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
loop_relieve(Loop *self, PyObject *args)
{
    long long limit_ns;
    if (!PyArg_ParseTuple(args, "L", &limit_ns))
        return NULL;
    PyObject *blocked = PyList_New(0);
    if (blocked == NULL)
        return NULL;
    pthread_mutex_lock(&self->lock);
    int64_t now = now_ns(CLOCK_MONOTONIC);
    for (Worker *worker = self->workers; worker != NULL; worker = worker->next) {
        if (worker->device < 0 || now - worker->since_ns < limit_ns || self->stopping)
            continue;
        PyObject *pair = Py_BuildValue("(iL)", (int)self->devices[worker->device].id,
                                       (long long)(now - worker->since_ns));
        if (pair == NULL || PyList_Append(blocked, pair)) {
            Py_XDECREF(pair);
            pthread_mutex_unlock(&self->lock);
            Py_DECREF(blocked);
            return NULL;
        }
        Py_DECREF(pair);
        bool others = false;
        for (Py_ssize_t i = 0; i < self->device_count; i++)
            others |= i != worker->device && self->devices[i].owner == worker->number &&
                      !self->devices[i].lost;
        if (!others)
            continue;
        int64_t missed = (now - worker->deadline_ns) / self->period_ns;
        Worker *relief = employ(self, worker->deadline_ns + (missed + 1) * self->period_ns);
        if (relief == NULL)
            continue;
        for (Py_ssize_t i = 0; i < self->device_count; i++) {
            Device *device = &self->devices[i];
            if (i == worker->device || device->owner != worker->number)
                continue;
            device->owner = relief->number;
            if (!device->lost)
                device->dropped += missed + (i > worker->device);
        }
    }
    pthread_mutex_unlock(&self->lock);
    return blocked;
}

static PyObject *
loop_set_period(Loop *self, PyObject *args)
{
    long long period_ns;
    if (!PyArg_ParseTuple(args, "L", &period_ns))
        return NULL;
    if (period_ns <= 0 || period_ns > LONGEST_PERIOD_NS) {
        PyErr_SetString(PyExc_ValueError, "a period is positive, and at most three years");
        return NULL;
    }
    pthread_mutex_lock(&self->lock);
    self->period_ns = period_ns;
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *
loop_stop(Loop *self, PyObject *args)
{
    long long timeout_ns;
    if (!PyArg_ParseTuple(args, "L", &timeout_ns))
        return NULL;
    if (timeout_ns < 0 || timeout_ns > LONGEST_WAIT_NS) {
        PyErr_SetString(PyExc_ValueError, "a time to wait is between 0 and an hour");
        return NULL;
    }
    long stuck = 0;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    self->stopping = true;
    pthread_cond_broadcast(&self->wake);
    pthread_mutex_unlock(&self->lock);
    int64_t until_ns = now_ns(CLOCK_MONOTONIC) + timeout_ns;
    struct timespec until = {until_ns / SECOND, until_ns % SECOND};
    pthread_mutex_lock(&self->lock);
    for (Worker *worker = self->workers; worker != NULL; worker = worker->next) {
        while (!worker->ended && pthread_cond_timedwait(&self->wake, &self->lock, &until) == 0)
            ;
        stuck += !worker->ended;
    }
    pthread_mutex_unlock(&self->lock);
    for (Worker *worker = self->workers; worker != NULL; worker = worker->next)
        if (worker->ended && !worker->joined)
            worker->joined = pthread_join(worker->thread, NULL) == 0;
    Py_END_ALLOW_THREADS
    self->leaked = stuck > 0;
    return PyLong_FromLong(stuck);
}

/* ------------------------------------------------------------------ records to columns */

static const Record *
at_cursor(const Loop *loop, const Device *device)
{
    uint64_t tail = atomic_load_explicit(&device->tail, memory_order_relaxed);
    uint64_t place = (tail + (uint64_t)device->cursor) & (loop->capacity - 1);
    return (const Record *)(device->records + place * loop->record_bytes);
}

typedef struct {
    PyObject *data, *valid;
    Py_ssize_t nulls;
} Buffers;

static bool
allocate(Buffers *buffers, Py_ssize_t bytes, Py_ssize_t rows)
{
    buffers->nulls = 0;
    buffers->data = PyBytes_FromStringAndSize(NULL, bytes);
    buffers->valid = PyBytes_FromStringAndSize(NULL, (rows + 7) / 8);
    if (buffers->data == NULL || buffers->valid == NULL)
        return false;
    memset(PyBytes_AsString(buffers->valid), 0, (rows + 7) / 8);
    return true;
}

static void
put_valid(Buffers *buffers, Py_ssize_t row, bool known)
{
    if (known)
        PyBytes_AsString(buffers->valid)[row >> 3] |= (char)(1 << (row & 7));
    else
        buffers->nulls++;
}

static PyObject *
loop_take(Loop *self, PyObject *none)
{
    (void)none;
    Py_ssize_t rows = 0;
    Py_ssize_t available[self->device_count > 0 ? self->device_count : 1];
    for (Py_ssize_t i = 0; i < self->device_count; i++) {
        Device *device = &self->devices[i];
        available[i] = (Py_ssize_t)(atomic_load_explicit(&device->head, memory_order_acquire) -
                                    atomic_load_explicit(&device->tail, memory_order_relaxed));
        device->cursor = 0;
        rows += available[i];
    }
    PyObject *result = NULL;
    Py_ssize_t columns = 4 + self->column_count;
    Buffers made[4 + MAX_COLUMNS];
    memset(made, 0, sizeof made);
    for (Py_ssize_t c = 0; c < columns; c++)
        if (!allocate(&made[c], c == 2 || c == 3 ? 4 * rows : 8 * rows, rows))
            goto done;
    int64_t *times = (int64_t *)PyBytes_AsString(made[0].data);
    int64_t *spans = (int64_t *)PyBytes_AsString(made[1].data);
    int32_t *ids = (int32_t *)PyBytes_AsString(made[2].data);
    int32_t *names = (int32_t *)PyBytes_AsString(made[3].data);
    for (Py_ssize_t row = 0; row < rows; row++) {
        Device *next = NULL;
        const Record *record = NULL;
        for (Py_ssize_t i = 0; i < self->device_count; i++) {
            Device *device = &self->devices[i];
            if (device->cursor >= available[i])
                continue;
            const Record *candidate = at_cursor(self, device);
            if (record == NULL || candidate->time_ns < record->time_ns)
                next = device, record = candidate;
        }
        times[row] = record->time_ns;
        spans[row] = record->span_ns;
        ids[row] = next->id;
        names[row] = next->name < 0 ? 0 : next->name;
        put_valid(&made[3], row, next->name >= 0);
        for (Py_ssize_t c = 0; c < self->column_count; c++) {
            ((Value *)PyBytes_AsString(made[4 + c].data))[row] = record->values[c];
            put_valid(&made[4 + c], row, record->known >> c & 1);
        }
        next->cursor++;
    }
    for (Py_ssize_t i = 0; i < self->device_count; i++)
        atomic_fetch_add_explicit(&self->devices[i].tail, (uint64_t)available[i],
                                  memory_order_release);
    result = PyList_New(columns);
    for (Py_ssize_t c = 0; c < columns && result != NULL; c++) {
        PyObject *parts = c < 3 ? Py_BuildValue("(OOn)", Py_None, made[c].data, (Py_ssize_t)0)
                                : Py_BuildValue("(OOn)", made[c].valid, made[c].data, made[c].nulls);
        if (parts == NULL)
            Py_CLEAR(result);
        else
            PyList_SetItem(result, c, parts);
    }
    if (result != NULL)
        result = Py_BuildValue("(nN)", rows, result);
done:
    for (Py_ssize_t c = 0; c < columns; c++) {
        Py_XDECREF(made[c].data);
        Py_XDECREF(made[c].valid);
    }
    return result;
}

static PyObject *
counts(const uint64_t *buckets)
{
    PyObject *found = PyDict_New();
    for (long key = 0; key < BUCKETS && found != NULL; key++) {
        if (!buckets[key])
            continue;
        PyObject *name = PyLong_FromLong(key), *value = PyLong_FromUnsignedLongLong(buckets[key]);
        if (name == NULL || value == NULL || PyDict_SetItem(found, name, value))
            Py_CLEAR(found);
        Py_XDECREF(name);
        Py_XDECREF(value);
    }
    return found;
}

static PyObject *
loop_statistics(Loop *self, PyObject *none)
{
    (void)none;
    pthread_mutex_lock(&self->lock);
    PyObject *devices = PyList_New(self->device_count);
    for (Py_ssize_t i = 0; i < self->device_count && devices != NULL; i++) {
        Device *device = &self->devices[i];
        PyObject *refused = PyTuple_New(self->column_count);
        for (Py_ssize_t c = 0; c < self->column_count && refused != NULL; c++) {
            Column *column = &device->columns[c];
            int code = column->refused;
            if (!code && column->call >= 0)
                code = device->calls[column->call].refused;
            PyObject *number = PyLong_FromLong(code);
            if (number == NULL)
                Py_CLEAR(refused);
            else
                PyTuple_SetItem(refused, c, number);
        }
        PyObject *one = refused == NULL
            ? NULL
            : Py_BuildValue("(iKKKKLiN)", (int)device->id, (unsigned long long)device->samples,
                            (unsigned long long)device->late, (unsigned long long)device->dropped,
                            (unsigned long long)device->overflowed,
                            (long long)(device->last_ns - device->first_ns), device->lost, refused);
        if (one == NULL)
            Py_CLEAR(devices);
        else
            PyList_SetItem(devices, i, one);
    }
    PyObject *result = devices == NULL
        ? NULL
        : Py_BuildValue("(NNNK)", devices, counts(self->jitter), counts(self->cost),
                        (unsigned long long)self->ticks);
    pthread_mutex_unlock(&self->lock);
    return result;
}

/* ------------------------------------------------------------------ the plan */

/* The next part of the device's block; its size was counted before. */
static void *
part_of(Device *device, size_t bytes)
{
    void *part = device->block + device->used;
    device->used += ALIGNED(bytes);
    return device->used <= device->block_bytes ? part : NULL;
}

/* How large a device's block is; 0 with an exception, or for what is no device. */
static size_t
bytes_of(PyObject *calls, PyObject *columns)
{
    size_t bytes = ALIGNED(PyTuple_Size(calls) * sizeof(Call)) +
                   ALIGNED(PyTuple_Size(columns) * sizeof(Column));
    for (Py_ssize_t i = 0; i < PyTuple_Size(calls); i++) {
        PyObject *call = PyTuple_GetItem(calls, i);
        PyObject *buffer = PyTuple_Check(call) && PyTuple_Size(call) == 7
            ? PyTuple_GetItem(call, 3) : NULL;
        if (buffer == NULL || !PyBytes_Check(buffer))
            return 0;
        bytes += ALIGNED(PyBytes_Size(buffer)) + ALIGNED(sizeof(Interval));
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(columns); i++) {
        PyObject *column = PyTuple_GetItem(columns, i);
        if (column == Py_None)
            continue;
        PyObject *places = PyTuple_Check(column) && PyTuple_Size(column) == 7
            ? PyTuple_GetItem(column, 2) : NULL;
        if (places == NULL || !PyTuple_Check(places) || PyTuple_Size(places) > MAX_PLACES)
            return 0;
        bytes += ALIGNED(PyTuple_Size(places) * sizeof(Place));
    }
    return bytes;
}

static bool
take_places(Column *column, PyObject *given, Device *device)
{
    column->place_count = (int)PyTuple_Size(given);
    column->places = part_of(device, column->place_count * sizeof(Place));
    if (column->places == NULL)
        return false;
    for (int i = 0; i < column->place_count; i++) {
        Place *place = &column->places[i];
        long long tag;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, i), "iiL", &place->offset, &place->width, &tag))
            return false;
        place->tag = tag;
        bool is_field = column->kind == FIELD || column->kind == SUM;
        int bytes = is_field ? FIELD_BYTES : column->kind == METRIC ? METRIC_BYTES : place->width;
        int w = place->width;
        if ((w != 1 && w != 2 && w != 4 && w != 8) || place->offset < 0 ||
            (Py_ssize_t)place->offset + bytes > device->calls[column->call].size)
            return false;
    }
    return column->place_count > 0;
}

static bool
take_column(Column *column, PyObject *given, Device *device)
{
    column->call = -1;
    if (given == Py_None)
        return true;
    PyObject *places, *factor;
    int nonzero, sentinel;
    long long most;
    if (!PyArg_ParseTuple(given, "iiO!OppL", &column->kind, &column->call, &PyTuple_Type, &places,
                          &factor, &nonzero, &sentinel, &most))
        return false;
    if (column->call < 0 || column->call >= device->call_count || column->kind < NUMBER ||
        column->kind > METRIC || most < 0)
        return false;
    column->nonzero = nonzero;
    column->sentinel = sentinel;
    column->most = most;
    column->is_float = PyFloat_Check(factor);
    if (column->is_float)
        column->float_factor = PyFloat_AsDouble(factor);
    else
        column->factor = PyLong_AsLongLong(factor);
    return !PyErr_Occurred() && (column->kind != METRIC || column->is_float) &&
           take_places(column, places, device);
}

static bool
take_interval(Call *call, PyObject *given, Device *device)
{
    unsigned long long compute, older, newer;
    int at_older, at_newer;
    if (!PyTuple_Check(given))
        return false;
    if (!PyArg_ParseTuple(given, "KKKii", &compute, &older, &newer, &at_older, &at_newer))
        return false;
    Py_ssize_t last = call->size - (Py_ssize_t)sizeof(void *);
    if (!compute || at_older < 0 || at_newer < 0 || at_older > last || at_newer > last)
        return false;
    Interval *interval = call->interval = part_of(device, sizeof(Interval));
    if (interval == NULL)
        return false;
    interval->compute = (int (*)(void *))(uintptr_t)compute;
    interval->snapshots[0] = (void *)(uintptr_t)older;
    interval->snapshots[1] = (void *)(uintptr_t)newer;
    interval->at[0] = at_older;
    interval->at[1] = at_newer;
    return true;
}

static bool
take_call(Call *call, PyObject *given, Device *device)
{
    unsigned long long function, handle;
    PyObject *argument, *interval;
    const char *buffer;
    if (!PyArg_ParseTuple(given, "KKOy#Oii", &function, &handle, &argument, &buffer, &call->size,
                          &interval, &call->every, &call->turn) ||
        !function || call->every < 1 || call->turn < 0 || call->turn >= call->every)
        return false;
    call->function = (void *)(uintptr_t)function;
    call->handle = (void *)(uintptr_t)handle;
    call->with_argument = argument != Py_None;
    if (call->with_argument)
        call->argument = (unsigned)PyLong_AsUnsignedLong(argument);
    call->buffer = part_of(device, call->size);
    if (call->buffer == NULL || PyErr_Occurred())
        return false;
    memcpy(call->buffer, buffer, call->size);
    return interval == Py_None || take_interval(call, interval, device);
}

static bool
take_device(Loop *loop, Device *device, PyObject *given)
{
    PyObject *calls, *columns;
    int id, name;
    if (!PyArg_ParseTuple(given, "iiO!O!", &id, &name, &PyTuple_Type, &calls, &PyTuple_Type,
                          &columns))
        return false;
    device->id = id;
    device->name = name;
    device->call_count = PyTuple_Size(calls);
    device->block_bytes = bytes_of(calls, columns);
    if (device->call_count > MAX_COLUMNS || PyTuple_Size(columns) != loop->column_count)
        return false;
    device->block = aligned_alloc(LINE, (device->block_bytes + LINE) / LINE * LINE);
    device->records = aligned_alloc(LINE, (loop->capacity * loop->record_bytes + LINE) / LINE * LINE);
    if (device->block == NULL || device->records == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memset(device->block, 0, device->block_bytes);
    device->calls = part_of(device, device->call_count * sizeof(Call));
    device->columns = part_of(device, loop->column_count * sizeof(Column));
    if (device->calls == NULL || device->columns == NULL)
        return false;
    for (Py_ssize_t i = 0; i < device->call_count; i++)
        if (!take_call(&device->calls[i], PyTuple_GetItem(calls, i), device))
            return false;
    for (Py_ssize_t i = 0; i < loop->column_count; i++)
        if (!take_column(&device->columns[i], PyTuple_GetItem(columns, i), device))
            return false;
    for (Py_ssize_t i = 0; i < loop->column_count; i++) {
        Column *column = &device->columns[i];
        Value unused;
        if (column->call >= 0 && column->kind == RESIDENCY) /* counts from what was read before */
            residency(column, device->calls[column->call].buffer, &unused);
    }
    return true;
}

static bool
take_plan(Loop *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"period_ns", "capacity", "column_count", "outcomes", "keep_empty", "devices", NULL};
    long long period_ns;
    unsigned long long capacity;
    PyObject *outcomes, *devices;
    int keep_empty;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "LKnO!pO!", names, &period_ns, &capacity,
                                     &self->column_count, &PyTuple_Type, &outcomes, &keep_empty,
                                     &PyTuple_Type, &devices))
        return false;
    if (period_ns <= 0 || period_ns > LONGEST_PERIOD_NS || !capacity || capacity & (capacity - 1) ||
        capacity > MAX_CAPACITY || self->column_count < 0 || self->column_count > MAX_COLUMNS ||
        PyTuple_Size(devices) > MAX_DEVICES) {
        PyErr_SetString(PyExc_ValueError,
                        "wanted: a positive period, a capacity that is a power of two up to 2^24, "
                        "at most 32 columns and 1024 devices");
        return false;
    }
    self->period_ns = period_ns;
    self->capacity = capacity;
    self->keep_empty = keep_empty;
    self->record_bytes = sizeof(Record) + self->column_count * sizeof(Value);
    self->outcome_count = PyTuple_Size(outcomes);
    self->outcomes = calloc(self->outcome_count ? self->outcome_count : 1, sizeof *self->outcomes);
    Py_ssize_t device_count = PyTuple_Size(devices);
    self->devices = calloc(device_count ? device_count : 1, sizeof(Device));
    if (self->outcomes == NULL || self->devices == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < self->outcome_count; i++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(outcomes, i), "ii", &self->outcomes[i].code,
                              &self->outcomes[i].kind))
            return false;
    for (; self->device_count < device_count; self->device_count++)
        if (!take_device(self, &self->devices[self->device_count],
                         PyTuple_GetItem(devices, self->device_count))) {
            self->device_count++; /* what of it was made is freed with the rest */
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a device of the plan does not fit");
            return false;
        }
    return true;
}

/* There is no loop without its plan: everything is made here, nothing is left to __init__. */
static PyObject *
loop_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Loop *self = (Loop *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    if (!take_plan(self, args, keywords))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
loop_dealloc(Loop *self)
{
    if (!self->leaked) {
        bool running = false;
        for (Worker *worker = self->workers; worker != NULL; worker = worker->next)
            running |= !worker->joined;
        if (running) {
            PyObject *timeout = Py_BuildValue("(L)", (long long)SECOND);
            PyObject *stuck = timeout == NULL ? NULL : loop_stop(self, timeout);
            Py_XDECREF(timeout);
            Py_XDECREF(stuck);
            PyErr_Clear();
        }
    }
    /* A thread that is still inside a driver's call goes on using the loop: it is never freed. */
    if (self->leaked)
        return;
    for (Py_ssize_t i = 0; i < self->device_count; i++) {
        free(self->devices[i].block);
        free(self->devices[i].records);
    }
    free(self->devices);
    free(self->outcomes);
    while (self->workers != NULL) {
        Worker *worker = self->workers;
        self->workers = worker->next;
        free(worker);
    }
    pthread_mutex_destroy(&self->lock);
    pthread_cond_destroy(&self->wake);
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef loop_methods[] = {
    {"start", (PyCFunction)loop_start, METH_VARARGS, NULL},
    {"relieve", (PyCFunction)loop_relieve, METH_VARARGS, NULL},
    {"set_period", (PyCFunction)loop_set_period, METH_VARARGS, NULL},
    {"take", (PyCFunction)loop_take, METH_NOARGS, NULL},
    {"statistics", (PyCFunction)loop_statistics, METH_NOARGS, NULL},
    {"stop", (PyCFunction)loop_stop, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot loop_slots[] = {
    {Py_tp_new, loop_new},
    {Py_tp_dealloc, loop_dealloc},
    {Py_tp_methods, loop_methods},
    {Py_tp_doc, "Calls a driver's functions at absolute deadlines. See _fast.pyi."},
    {0, NULL},
};

static PyType_Spec loop_spec = {
    .name = "chopper.collectors._fast.Loop",
    .basicsize = sizeof(Loop),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = loop_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &loop_spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Loop", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_fast",
    .m_doc = "The fast tier of a sampler.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__fast(void)
{
    return PyModuleDef_Init(&module_def);
}
