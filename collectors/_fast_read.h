/*
 * One reading of the sampler's fast tier (_fast.c): what a plan looks like in memory, and how a device's
 * calls become a record in its ring. All of it is static, so that the compiler sees through it.
 */

#include <Python.h>

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define SECOND INT64_C(1000000000)
#define MAX_COLUMNS 32
#define MAX_PLACES 64
#define BUCKETS 4096

/* What an error code takes away; anything else costs this reading. */
enum { MOMENT, SENSOR, DEVICE };

/* How a column is made of what a call wrote. */
enum { NUMBER, FIELD, MEAN, RESIDENCY, SUM, METRIC };

/* nvmlFieldValue_t. */
enum { FIELD_TYPE = 24, FIELD_CODE = 28, FIELD_VALUE = 32, FIELD_BYTES = 40 };
enum { VERSION_MISMATCH = 25 };

/* nvmlGpmMetric_t. */
enum { METRIC_CODE = 4, METRIC_VALUE = 8, METRIC_BYTES = 40 };

/* A call that has nothing to tell yet, or whose turn it is not: no driver returns them, and they
 * cost this reading. */
enum { NOT_YET = INT32_MIN, NOT_NOW };

typedef struct {
    int32_t offset, width;
    int64_t tag; /* NUMBER: 1 for a signed one; FIELD, SUM: what one unit is, 0 for the column's
                    factor; MEAN: 1 for an item of the mean; RESIDENCY: the bit, 0 for the ticks */
    uint64_t last;
    int refused;
    bool had;
} Place;

typedef struct {
    int kind, call;
    Place *places;
    int place_count;
    int refused; /* the code that took it away */
    bool is_float, nonzero, sentinel;
    bool had; /* RESIDENCY: there was a reading before */
    union { int64_t factor; double float_factor; };
    int64_t most; /* NUMBER, FIELD, METRIC: what is larger, or less than 0, is no value; 0 for no such end */
} Column;

/* What a driver computes between two snapshots of its counters (GPM). */
typedef struct {
    int (*compute)(void *);
    void *snapshots[2];
    int32_t at[2]; /* where the request names the older and the newer one */
    int newer; /* of the snapshots, the one that is taken next */
    bool has_older;
} Interval;

typedef struct {
    void *function, *handle, *buffer;
    Interval *interval; /* NULL: the function itself fills the buffer */
    Py_ssize_t size;
    unsigned argument;
    bool with_argument;
    int refused;
    int every, turn; /* made at one of so many samples, and how many pass until then */
} Call;

typedef union {
    int64_t i;
    double d;
} Value;

typedef struct {
    int64_t time_ns, span_ns;
    uint64_t known; /* a bit a column */
    Value values[];
} Record;

typedef struct {
    int32_t id;
    int32_t name; /* its code in the dictionary of the second column, -1 for none */
    char *block; /* calls, their buffers, columns, places */
    size_t used, block_bytes;
    Call *calls;
    Py_ssize_t call_count;
    Column *columns;
    int owner, lost;
    char *records;
    _Atomic uint64_t head, tail;
    uint64_t samples, late, dropped, overflowed;
    int64_t first_ns, last_ns;
    Py_ssize_t cursor; /* while draining */
} Device;

typedef struct Loop Loop;

typedef struct Worker {
    struct Worker *next;
    Loop *loop;
    pthread_t thread;
    int number, device; /* the one whose call it is in, -1 between calls */
    int64_t since_ns, deadline_ns;
    bool ended, joined;
} Worker;

struct Loop {
    PyObject_HEAD
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stopping, keep_empty;
    int64_t period_ns;
    Device *devices;
    Py_ssize_t device_count;
    Py_ssize_t column_count;
    uint64_t capacity; /* of a ring, in records; a power of two */
    size_t record_bytes;
    struct { int code, kind; } *outcomes;
    Py_ssize_t outcome_count;
    Worker *workers;
    int worker_count;
    bool leaked; /* a thread never came back: what it uses must stay */
    uint64_t jitter[BUCKETS], cost[BUCKETS];
    uint64_t ticks;
};

static int64_t
now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

/* As Quantiles of the sampler counts: 1/16 of a power of two. */
static void
count(uint64_t *buckets, int64_t value)
{
    uint64_t v = value > 0 ? (uint64_t)value : 0;
    int bits = v ? 64 - __builtin_clzll(v) : 0;
    int shift = bits > 5 ? bits - 5 : 0;
    buckets[(shift << 6) | (v >> shift)]++;
}

/* ------------------------------------------------------------------ one reading */

static int
outcome(const Loop *loop, int code)
{
    for (Py_ssize_t i = 0; i < loop->outcome_count; i++)
        if (loop->outcomes[i].code == code)
            return loop->outcomes[i].kind;
    return MOMENT;
}

/* Take a snapshot and compute what lies between it and the one before. While the driver has nothing
 * to tell of so short a time, the older one stays: the next reading covers the time of both. */
static int
make_interval(const Call *call)
{
    Interval *interval = call->interval;
    void **snapshots = interval->snapshots;
    int code = ((int (*)(void *, void *))call->function)(call->handle, snapshots[interval->newer]);
    if (code)
        return code;
    if (!interval->has_older) {
        interval->has_older = true;
        interval->newer ^= 1;
        return NOT_YET;
    }
    char *request = call->buffer;
    memcpy(request + interval->at[0], &snapshots[interval->newer ^ 1], sizeof(void *));
    memcpy(request + interval->at[1], &snapshots[interval->newer], sizeof(void *));
    code = interval->compute(request);
    if (!code)
        interval->newer ^= 1;
    return code;
}

static int
make_call(Call *call)
{
    if (call->interval != NULL)
        return make_interval(call);
    if (call->with_argument)
        return ((int (*)(void *, unsigned, void *))call->function)(call->handle, call->argument,
                                                                   call->buffer);
    return ((int (*)(void *, void *))call->function)(call->handle, call->buffer);
}

/* A number of the buffer; false for the sentinel, all bits one, where that means not available. */
static bool
number_at(const char *buffer, const Place *place, bool sentinel, uint64_t *out)
{
    uint64_t value = 0;
    memcpy(&value, buffer + place->offset, place->width); /* little-endian, as these machines are */
    *out = value;
    return !sentinel || value != (place->width == 8 ? UINT64_MAX : (UINT64_C(1) << place->width * 8) - 1);
}

static bool
scaled(const Column *column, uint64_t value, bool is_signed, Value *out)
{
    if ((column->nonzero && !value) || (column->most && value > (uint64_t)column->most))
        return false;
    if (column->is_float)
        out->d = (is_signed ? (double)(int32_t)value : (double)value) * column->float_factor;
    else
        return value <= INT64_MAX &&
               !__builtin_mul_overflow((int64_t)value, column->factor, &out->i);
    return true;
}

/* The value of an nvmlFieldValue_t, or the code that it failed with. */
static int
field(const Column *column, const Place *place, const char *buffer, Value *out, bool *known)
{
    const char *at = buffer + place->offset;
    int32_t code;
    uint32_t type;
    memcpy(&code, at + FIELD_CODE, sizeof code);
    if (code)
        return code;
    memcpy(&type, at + FIELD_TYPE, sizeof type);
    union { double d; uint32_t ui; uint64_t ull; int64_t sll; int32_t si; uint16_t us; } value;
    memcpy(&value, at + FIELD_VALUE, 8);
    double as_float;
    int64_t as_integer;
    bool told = true;
    *known = false;
    switch (type) {
    case 0:
        as_float = value.d;
        told = column->is_float || fabs(value.d) < 9.2e18;
        as_integer = fabs(value.d) < 9.2e18 ? (int64_t)value.d : 0;
        break;
    case 1: as_float = as_integer = value.ui; told = value.ui != UINT32_MAX; break;
    case 2:
    case 3:
        as_float = (double)value.ull;
        as_integer = (int64_t)value.ull;
        told = value.ull != UINT64_MAX && (column->is_float || value.ull <= INT64_MAX);
        break;
    case 4: as_float = (double)value.sll; as_integer = value.sll; break;
    case 5: as_float = as_integer = value.si; break;
    case 6: as_float = as_integer = value.us; break;
    default: return VERSION_MISMATCH;
    }
    if ((column->nonzero && as_float == 0) ||
        (column->most && !(as_float >= 0 && as_float <= (double)column->most)))
        told = false;
    if (column->is_float) {
        out->d = as_float * column->float_factor;
        *known = told && isfinite(out->d);
    } else
        *known = told && isfinite(as_float) && !__builtin_mul_overflow(
            as_integer, place->tag ? place->tag : column->factor, &out->i);
    return 0;
}

/* The first of the fields that the device has; the code of an error that takes more than a reading. */
static int
first_field(const Loop *loop, Column *column, const char *buffer, Value *out, bool *known)
{
    for (int i = 0; i < column->place_count; i++) {
        Place *place = &column->places[i];
        if (place->refused)
            continue;
        int code = field(column, place, buffer, out, known);
        int kind = code ? outcome(loop, code) : MOMENT;
        if (kind == DEVICE)
            return code;
        if (kind == MOMENT)
            return 0;
        place->refused = code;
    }
    return column->places[0].refused;
}

static int
sum_of_fields(const Loop *loop, const Column *column, const char *buffer, Value *out, bool *known)
{
    int64_t sum = 0;
    for (int i = 0; i < column->place_count; i++) {
        bool one = false;
        int code = field(column, &column->places[i], buffer, out, &one);
        if (code)
            return outcome(loop, code) == MOMENT ? 0 : code;
        if (!one || __builtin_add_overflow(sum, out->i, &sum))
            return 0; /* a sum of some is not the sum */
    }
    out->i = sum;
    *known = true;
    return 0;
}

/* The value of an nvmlGpmMetric_t, or the code that it failed with. */
static int
metric(const Column *column, const char *buffer, Value *out, bool *known)
{
    const char *at = buffer + column->places[0].offset;
    int32_t code;
    double value;
    memcpy(&code, at + METRIC_CODE, sizeof code);
    memcpy(&value, at + METRIC_VALUE, sizeof value);
    out->d = value * column->float_factor;
    *known = !code && isfinite(value) &&
             (!column->most || (value >= 0 && value <= (double)column->most));
    return code;
}

static bool
mean(const Column *column, const char *buffer, Value *out)
{
    uint64_t sum = 0, items = 0, value;
    for (int i = 0; i < column->place_count; i++)
        if (column->places[i].tag && number_at(buffer, &column->places[i], true, &value) && value)
            sum += value, items++;
    if (items) {
        out->i = llrint((double)(sum * (uint64_t)column->factor) / (double)items);
        return true;
    }
    for (int i = 0; i < column->place_count; i++)
        if (!column->places[i].tag && number_at(buffer, &column->places[i], true, &value))
            return scaled(column, value, false, out);
    return false;
}

/* The bits of the accumulators that grew since the reading before. */
static bool
residency(Column *column, const char *buffer, Value *out)
{
    bool before = column->had, back = false, any = false, has_ticks = false;
    uint64_t value[MAX_PLACES], ticks = 0;
    bool has[MAX_PLACES];
    int n = column->place_count;
    for (int i = 0; i < n; i++) {
        has[i] = number_at(buffer, &column->places[i], true, &value[i]);
        if (column->places[i].tag)
            any |= has[i];
        else
            has_ticks = has[i];
    }
    if (!has_ticks || !any)
        return false;
    for (int i = 0; i < n && before; i++)
        if (!column->places[i].tag && column->places[i].had && value[i] == column->places[i].last)
            return false; /* not refreshed since */
    out->i = 0;
    for (int i = 0; i < n; i++) {
        Place *place = &column->places[i];
        if (before && place->had && has[i]) {
            back |= value[i] < place->last;
            if (!place->tag)
                ticks = value[i] - place->last;
            else if (value[i] > place->last)
                out->i |= place->tag;
        }
        place->had = has[i];
        place->last = value[i];
    }
    column->had = true;
    return before && !back && ticks;
}

/* Read one device and write its record. Called without the lock; only the owner does. */
static void
sample(Loop *loop, Device *device, int64_t *begun_ns)
{
    char space[sizeof(Record) + MAX_COLUMNS * sizeof(Value)] __attribute__((aligned(8)));
    Record *record = (Record *)space;
    int codes[MAX_COLUMNS];
    bool answered = false;
    int64_t real_ns = now_ns(CLOCK_REALTIME);
    int64_t before_ns = *begun_ns = now_ns(CLOCK_MONOTONIC);
    for (Py_ssize_t i = 0; i < device->call_count; i++) {
        Call *call = &device->calls[i];
        bool now = call->turn == 0;
        call->turn = (now ? call->every : call->turn) - 1;
        codes[i] = call->refused ? call->refused : now ? make_call(call) : NOT_NOW;
        answered |= !codes[i];
        if (codes[i] && !call->refused) {
            int kind = outcome(loop, codes[i]);
            if (kind == DEVICE) {
                device->lost = codes[i];
                return;
            }
            if (kind == SENSOR)
                call->refused = codes[i];
        }
    }
    record->span_ns = now_ns(CLOCK_MONOTONIC) - before_ns;
    record->time_ns = real_ns + record->span_ns / 2;
    record->known = 0;
    memset(record->values, 0, loop->column_count * sizeof(Value));
    for (Py_ssize_t i = 0; i < loop->column_count; i++) {
        Column *column = &device->columns[i];
        if (column->call < 0 || codes[column->call] || column->refused)
            continue;
        const char *buffer = device->calls[column->call].buffer;
        Value *out = &record->values[i];
        bool known = false;
        uint64_t value;
        switch (column->kind) {
        case NUMBER:
            for (int p = 0; p < column->place_count && !known; p++)
                if (number_at(buffer, &column->places[p], column->sentinel, &value)) {
                    known = scaled(column, value, column->places[p].tag, out);
                    break;
                }
            break;
        case FIELD:
        case SUM: {
            int code = column->kind == FIELD ? first_field(loop, column, buffer, out, &known)
                                             : sum_of_fields(loop, column, buffer, out, &known);
            if (code && outcome(loop, code) == DEVICE) {
                device->lost = code;
                return;
            }
            column->refused = code;
            break;
        }
        case METRIC: {
            int code = metric(column, buffer, out, &known);
            int kind = code ? outcome(loop, code) : MOMENT;
            if (kind == DEVICE) {
                device->lost = code;
                return;
            }
            column->refused = kind == SENSOR ? code : 0;
            break;
        }
        case MEAN: known = mean(column, buffer, out); break;
        case RESIDENCY: known = residency(column, buffer, out); break;
        }
        if (known)
            record->known |= UINT64_C(1) << i;
    }
    if (!answered || (!record->known && !loop->keep_empty))
        return;
    uint64_t head = atomic_load_explicit(&device->head, memory_order_relaxed);
    if (head - atomic_load_explicit(&device->tail, memory_order_acquire) >= loop->capacity) {
        device->overflowed++;
        return;
    }
    memcpy(device->records + (head & (loop->capacity - 1)) * loop->record_bytes, record,
           loop->record_bytes);
    atomic_store_explicit(&device->head, head + 1, memory_order_release);
}
