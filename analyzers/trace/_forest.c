/*
 * The forest of host spans, one pass over its rows each: parents and clipped times, ancestors,
 * who is innermost when, and what their codes stand for.
 *
 * Spans come in the order of their starts, the longest first, so that a parent's row is above its
 * children's and the spans open on a thread are the chain of parents of its latest row. What the
 * results mean, nesting.py says; span_forest_numpy.py computes the same in numpy, level by level.
 *
 * All arrays are the caller's, and do not overlap. Their types and lengths are checked, and so is
 * every number of a row or thread before it is used: whatever they hold, nothing outside of them is
 * read or written. Passes run without the GIL.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ arrays */

typedef enum { INT64, INT32, BOOL } Kind;

static const struct {
    const char *name, *formats;
    Py_ssize_t size;
} kinds[] = {
    [INT64] = {"int64", "lq", 8},
    [INT32] = {"int32", "il", 4},
    [BOOL] = {"bool", "?", 1},
};

typedef struct {
    const char *name;
    Kind kind;
    bool written;
} Wanted;

#define MAX_ARRAYS 8

typedef struct {
    Py_buffer buffers[MAX_ARRAYS];
    int held;
} Arrays;

static void
release(Arrays *arrays)
{
    while (arrays->held)
        PyBuffer_Release(&arrays->buffers[--arrays->held]);
}

static Py_ssize_t
length_of(const Arrays *arrays, int which)
{
    return arrays->buffers[which].len / arrays->buffers[which].itemsize;
}

/* Hold the next argument: one dimension of the wanted kind, without gaps. */
static bool
hold(Arrays *arrays, PyObject *given, const Wanted *wanted)
{
    Py_buffer *buffer = &arrays->buffers[arrays->held];
    int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (wanted->written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(given, buffer, flags) < 0)
        return false;
    arrays->held++;
    const char *format = buffer->format ? buffer->format : "B";
    if (buffer->ndim == 1 && buffer->itemsize == kinds[wanted->kind].size && format[0] != '\0'
        && format[1] == '\0' && strchr(kinds[wanted->kind].formats, format[0]) != NULL)
        return true;
    PyErr_Format(PyExc_TypeError, "%s: expected one dimension of %s, found %d of format %s",
                 wanted->name, kinds[wanted->kind].name, buffer->ndim, format);
    return false;
}

/* Hold all arguments, those before `loose` of one length; on an error none is held. */
static bool
take(Arrays *arrays, PyObject *const *given, const Wanted *wanted, int count, int loose)
{
    arrays->held = 0;
    for (int i = 0; i < count; i++) {
        if (!hold(arrays, given[i], &wanted[i])) {
            release(arrays);
            return false;
        }
        if (i < loose && length_of(arrays, i) != length_of(arrays, 0)) {
            PyErr_Format(PyExc_ValueError, "%s: expected %zd values, found %zd", wanted[i].name,
                         length_of(arrays, 0), length_of(arrays, i));
            release(arrays);
            return false;
        }
    }
    return true;
}

static bool
counted(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted)
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, found %zd", wanted, given);
    return given == wanted;
}

/* Where a pass met a number that it cannot use; the GIL is not held there. */
typedef struct {
    const char *what; /* NULL for none */
    Py_ssize_t row;
} Fault;

static const Fault fine = {NULL, 0};

static PyObject *
ended(Arrays *arrays, Fault fault)
{
    release(arrays);
    if (fault.what != NULL)
        return PyErr_Format(PyExc_ValueError, "row %zd: %s", fault.row, fault.what);
    Py_RETURN_NONE;
}

static const char not_above[] = "its parent is not a row above it";
static const char no_thread[] = "its thread is not one of those announced";

/* ------------------------------------------------------------------ parents and clipped times */

/* Sums that overflow wrap around, as numpy's do. */
static int64_t
plus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t
most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

typedef struct {
    const int64_t *start, *dur, *thread;
    int64_t tolerance;
    int64_t *latest; /* row of each thread, -1 for none yet */
    int64_t *parent;
    int32_t *depth;
    int64_t *clipped_start, *clipped_end;
} Nest;

/* The next sibling of each span is left in its place of clipped_start, -1 for none. */
static Fault
find_parents(const Nest *n, Py_ssize_t count, Py_ssize_t threads)
{
    for (Py_ssize_t i = 0; i < threads; i++)
        n->latest[i] = -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (n->thread[i] < 0 || n->thread[i] >= threads)
            return (Fault){no_thread, i};
        int64_t start = n->start[i], end = plus(start, n->dur[i]);
        int64_t above = n->latest[n->thread[i]], before = -1;
        while (above >= 0) {
            int64_t until = plus(n->start[above], n->dur[above]);
            if (plus(until, n->tolerance) >= end && until > start)
                break;
            before = above;
            above = n->parent[above];
        }
        n->latest[n->thread[i]] = i;
        n->parent[i] = above;
        n->depth[i] = above >= 0 ? n->depth[above] + 1 : 0;
        n->clipped_start[i] = -1;
        if (before >= 0)
            n->clipped_start[before] = i;
    }
    return fine;
}

static void
clip(const Nest *n, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t above = n->parent[i], next = n->clipped_start[i];
        int64_t start = n->start[i], end = plus(start, n->dur[i]);
        int64_t then = next >= 0 ? n->start[next] : 0;
        if (above >= 0) {
            int64_t limit = n->clipped_end[above];
            end = least(end, limit);
            start = least(start, end);
            if (next >= 0)
                then = least(then, least(plus(then, n->dur[next]), limit));
        }
        n->clipped_start[i] = start;
        n->clipped_end[i] = next >= 0 ? least(end, most(then, start)) : end;
    }
}

PyDoc_STRVAR(nest_doc, "nest(threads, tolerance_ns, start_ns, dur_ns, thread, parent, depth, "
                       "clipped_start_ns, clipped_end_ns, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_nest(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    static const Wanted wanted[] = {
        {"start_ns", INT64, false},        {"dur_ns", INT64, false},
        {"thread", INT64, false},          {"parent", INT64, true},
        {"depth", INT32, true},            {"clipped_start_ns", INT64, true},
        {"clipped_end_ns", INT64, true},
    };
    (void)module;
    if (!counted(given, 9))
        return NULL;
    Py_ssize_t threads = PyLong_AsSsize_t(args[0]);
    long long tolerance = PyLong_AsLongLong(args[1]);
    Arrays arrays;
    if (PyErr_Occurred() || !take(&arrays, args + 2, wanted, 7, 7))
        return NULL;
    Py_ssize_t count = length_of(&arrays, 0);
    if (threads < 0 || threads > count) {
        release(&arrays);
        return PyErr_Format(PyExc_ValueError, "%zd threads of %zd spans", threads, count);
    }
    int64_t *latest = malloc((size_t)(threads + 1) * sizeof *latest);
    if (latest == NULL) {
        release(&arrays);
        return PyErr_NoMemory();
    }
    const Nest nest = {
        .start = arrays.buffers[0].buf,
        .dur = arrays.buffers[1].buf,
        .thread = arrays.buffers[2].buf,
        .tolerance = tolerance,
        .latest = latest,
        .parent = arrays.buffers[3].buf,
        .depth = arrays.buffers[4].buf,
        .clipped_start = arrays.buffers[5].buf,
        .clipped_end = arrays.buffers[6].buf,
    };
    Fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault = find_parents(&nest, count, threads);
    if (fault.what == NULL)
        clip(&nest, count);
    Py_END_ALLOW_THREADS
    free(latest);
    return ended(&arrays, fault);
}

/* ------------------------------------------------------------------ ancestors */

static Fault
find_nearest(const int64_t *parent, const bool *marked, int64_t *found, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parent[i] >= i)
            return (Fault){not_above, i};
        found[i] = marked[i] ? i : parent[i] < 0 ? -1 : found[parent[i]];
    }
    return fine;
}

static Fault
find_topmost(const int64_t *parent, const bool *marked, int64_t *found, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parent[i] >= i)
            return (Fault){not_above, i};
        int64_t above = parent[i] < 0 ? -1 : found[parent[i]];
        found[i] = above >= 0 ? above : marked[i] ? i : -1;
    }
    return fine;
}

static Fault
find_containing(const int64_t *parent, const bool *marked, bool *found, Py_ssize_t count)
{
    memset(found, 0, (size_t)count * sizeof *found);
    for (Py_ssize_t i = count - 1; i >= 0; i--) {
        if (parent[i] >= i)
            return (Fault){not_above, i};
        if (parent[i] >= 0 && (marked[i] || found[i]))
            found[parent[i]] = true;
    }
    return fine;
}

static Fault
find_within(const int64_t *parent, const bool *marked, bool *found, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parent[i] >= i)
            return (Fault){not_above, i};
        found[i] = marked[i] || (parent[i] >= 0 && found[parent[i]]);
    }
    return fine;
}

typedef enum { NEAREST, TOPMOST, CONTAINING, WITHIN } Question;

static PyObject *
answered(Question question, PyObject *const *args, Py_ssize_t given)
{
    const Wanted wanted[] = {
        {"parent", INT64, false},
        {"marked", BOOL, false},
        {"found", question == CONTAINING || question == WITHIN ? BOOL : INT64, true},
    };
    Arrays arrays;
    if (!counted(given, 3) || !take(&arrays, args, wanted, 3, 3))
        return NULL;
    const int64_t *parent = arrays.buffers[0].buf;
    const bool *marked = arrays.buffers[1].buf;
    void *found = arrays.buffers[2].buf;
    Py_ssize_t count = length_of(&arrays, 0);
    Fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault = question == NEAREST      ? find_nearest(parent, marked, found, count)
            : question == TOPMOST    ? find_topmost(parent, marked, found, count)
            : question == CONTAINING ? find_containing(parent, marked, found, count)
                                     : find_within(parent, marked, found, count);
    Py_END_ALLOW_THREADS
    return ended(&arrays, fault);
}

PyDoc_STRVAR(nearest_doc, "nearest(parent, marked, found, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_nearest(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return answered(NEAREST, args, given);
}

PyDoc_STRVAR(topmost_doc, "topmost(parent, marked, found, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_topmost(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return answered(TOPMOST, args, given);
}

PyDoc_STRVAR(containing_doc, "containing(parent, marked, found, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_containing(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return answered(CONTAINING, args, given);
}

PyDoc_STRVAR(within_doc, "within(parent, marked, found, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_within(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return answered(WITHIN, args, given);
}

static Fault
hand_down(const int64_t *parent, int32_t *codes, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parent[i] >= i)
            return (Fault){not_above, i};
        if (codes[i] < 0)
            codes[i] = parent[i] < 0 ? -1 : codes[parent[i]];
    }
    return fine;
}

PyDoc_STRVAR(inherit_doc, "inherit(parent, codes, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_inherit(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    static const Wanted wanted[] = {{"parent", INT64, false}, {"codes", INT32, true}};
    (void)module;
    Arrays arrays;
    if (!counted(given, 2) || !take(&arrays, args, wanted, 2, 2))
        return NULL;
    Fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault = hand_down(arrays.buffers[0].buf, arrays.buffers[1].buf, length_of(&arrays, 0));
    Py_END_ALLOW_THREADS
    return ended(&arrays, fault);
}

/* ------------------------------------------------------------------ codes */

static const char no_value[] = "its code has no value";

/* As numpy's indexing, in which -1 is the last value. */
#define LOOK_UP(type)                                                                             \
    static Fault look_up_##type(const int32_t *codes, const type *values, type *found,            \
                                Py_ssize_t count, Py_ssize_t size)                                \
    {                                                                                             \
        for (Py_ssize_t i = 0; i < count; i++) {                                                  \
            Py_ssize_t at = codes[i] == -1 ? size - 1 : codes[i];                                 \
            if (at < 0 || at >= size)                                                             \
                return (Fault){no_value, i};                                                      \
            found[i] = values[at];                                                                \
        }                                                                                         \
        return fine;                                                                              \
    }

LOOK_UP(bool)
LOOK_UP(int32_t)

static PyObject *
looked_up(PyObject *const *args, Py_ssize_t given, Kind kind)
{
    const Wanted wanted[] = {{"codes", INT32, false}, {"found", kind, true}, {"values", kind, false}};
    Arrays arrays;
    if (!counted(given, 3) || !take(&arrays, args, wanted, 3, 2))
        return NULL;
    const int32_t *codes = arrays.buffers[0].buf;
    void *found = arrays.buffers[1].buf;
    const void *values = arrays.buffers[2].buf;
    Py_ssize_t count = length_of(&arrays, 0), size = length_of(&arrays, 2);
    Fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault = kind == BOOL ? look_up_bool(codes, values, found, count, size)
                         : look_up_int32_t(codes, values, found, count, size);
    Py_END_ALLOW_THREADS
    return ended(&arrays, fault);
}

PyDoc_STRVAR(masks_doc, "look_up_masks(codes, found, values, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_look_up_masks(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return looked_up(args, given, BOOL);
}

PyDoc_STRVAR(codes_doc, "look_up_codes(codes, found, values, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_look_up_codes(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return looked_up(args, given, INT32);
}

/* ------------------------------------------------------------------ segments */

/* Of one thread while its spans are walked. */
typedef struct {
    int64_t open;               /* innermost span, -1 for none */
    int64_t last_ns;            /* when the latest segment began */
    Py_ssize_t at, begin, end; /* the next segment's place, between the first one's and the bound */
} Walk;

typedef struct {
    const int64_t *start, *end, *parent, *thread;
    Walk *walks;
    int64_t *time, *span; /* NULL: segments are only counted */
} Segments;

/* From this time on this span is innermost; what was said of the same time before is void. */
static void
say(const Segments *s, Walk *walk, int64_t time, int64_t span)
{
    if (walk->at > walk->begin && walk->last_ns == time)
        walk->at--;
    if (s->time != NULL && walk->at < walk->end) {
        s->time[walk->at] = time;
        s->span[walk->at] = span;
    }
    walk->last_ns = time;
    walk->at++;
}

/* Close the spans of a thread that have ended by a time. */
static void
close_until(const Segments *s, Walk *walk, int64_t time)
{
    while (walk->open >= 0 && s->end[walk->open] <= time) {
        say(s, walk, s->end[walk->open], s->parent[walk->open]);
        walk->open = s->parent[walk->open];
    }
}

static Fault
walk_all(const Segments *s, Py_ssize_t count, Py_ssize_t threads)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (s->parent[i] >= i)
            return (Fault){not_above, i};
        if (s->thread[i] < 0 || s->thread[i] >= threads)
            return (Fault){no_thread, i};
        /* Spans without a duration open and close nothing. */
        if (s->end[i] <= s->start[i])
            continue;
        Walk *walk = &s->walks[s->thread[i]];
        close_until(s, walk, s->start[i]);
        say(s, walk, s->start[i], i);
        walk->open = i;
    }
    for (Py_ssize_t t = 0; t < threads; t++)
        close_until(s, &s->walks[t], INT64_MAX);
    return fine;
}

/* Where each thread's segments begin among those of all, and how many there are. */
static Fault
place(const Segments *s, Py_ssize_t count, Py_ssize_t threads, int64_t *first)
{
    Fault fault = walk_all(s, count, threads);
    first[0] = 0;
    for (Py_ssize_t t = 0; t < threads; t++)
        first[t + 1] = first[t] + s->walks[t].at;
    return fault;
}

static Fault
fill(const Segments *s, Py_ssize_t count, Py_ssize_t threads)
{
    Fault fault = walk_all(s, count, threads);
    for (Py_ssize_t t = 0; t < threads && fault.what == NULL; t++)
        if (s->walks[t].at != s->walks[t].end)
            return (Fault){"the segments of this thread are not as many as placed", t};
    return fault;
}

/* Walks of all threads: from `first` on, or from nothing where it is NULL; NULL with an error. */
static Walk *
begin_walks(Py_ssize_t threads, const int64_t *first, Py_ssize_t length)
{
    Walk *walks = calloc((size_t)threads + 1, sizeof *walks);
    if (walks == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t t = 0; t < threads; t++) {
        walks[t].open = -1;
        if (first == NULL)
            continue;
        if (first[t] < 0 || first[t + 1] < first[t] || first[t + 1] > length) {
            free(walks);
            PyErr_Format(PyExc_ValueError, "first: thread %zd has no place among %zd segments", t,
                         length);
            return NULL;
        }
        walks[t].at = walks[t].begin = (Py_ssize_t)first[t];
        walks[t].end = (Py_ssize_t)first[t + 1];
    }
    return walks;
}

static PyObject *
walked(PyObject *const *args, bool filled)
{
    static const Wanted wanted[] = {
        {"start_ns", INT64, false}, {"end_ns", INT64, false}, {"parent", INT64, false},
        {"thread", INT64, false},   {"first", INT64, true},   {"segment_start_ns", INT64, true},
        {"segment_span", INT64, true},
    };
    Arrays arrays;
    if (!take(&arrays, args, wanted, filled ? 7 : 5, 4))
        return NULL;
    Py_ssize_t count = length_of(&arrays, 0), threads = length_of(&arrays, 4) - 1;
    int64_t *first = arrays.buffers[4].buf;
    Walk *walks = NULL;
    if (threads < 0)
        PyErr_SetString(PyExc_ValueError, "first: expected a value more than there are threads");
    else if (filled && length_of(&arrays, 5) != length_of(&arrays, 6))
        PyErr_SetString(PyExc_ValueError, "segment_start_ns and segment_span differ in length");
    else
        walks = begin_walks(threads, filled ? first : NULL, filled ? length_of(&arrays, 5) : 0);
    if (walks == NULL) {
        release(&arrays);
        return NULL;
    }
    const Segments segments = {
        .start = arrays.buffers[0].buf,
        .end = arrays.buffers[1].buf,
        .parent = arrays.buffers[2].buf,
        .thread = arrays.buffers[3].buf,
        .walks = walks,
        .time = filled ? arrays.buffers[5].buf : NULL,
        .span = filled ? arrays.buffers[6].buf : NULL,
    };
    Fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault = filled ? fill(&segments, count, threads) : place(&segments, count, threads, first);
    Py_END_ALLOW_THREADS
    free(walks);
    return ended(&arrays, fault);
}

PyDoc_STRVAR(place_doc, "place_segments(start_ns, end_ns, parent, thread, first, /)\n--\n\n"
                        "See _forest.pyi.");

static PyObject *
forest_place_segments(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return counted(given, 5) ? walked(args, false) : NULL;
}

PyDoc_STRVAR(fill_doc, "fill_segments(start_ns, end_ns, parent, thread, first, segment_start_ns, "
                       "segment_span, /)\n--\n\nSee _forest.pyi.");

static PyObject *
forest_fill_segments(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    return counted(given, 7) ? walked(args, true) : NULL;
}

/* ------------------------------------------------------------------ the module */

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef methods[] = {
    {"nest", FAST(forest_nest), METH_FASTCALL, nest_doc},
    {"nearest", FAST(forest_nearest), METH_FASTCALL, nearest_doc},
    {"topmost", FAST(forest_topmost), METH_FASTCALL, topmost_doc},
    {"containing", FAST(forest_containing), METH_FASTCALL, containing_doc},
    {"within", FAST(forest_within), METH_FASTCALL, within_doc},
    {"inherit", FAST(forest_inherit), METH_FASTCALL, inherit_doc},
    {"look_up_masks", FAST(forest_look_up_masks), METH_FASTCALL, masks_doc},
    {"look_up_codes", FAST(forest_look_up_codes), METH_FASTCALL, codes_doc},
    {"place_segments", FAST(forest_place_segments), METH_FASTCALL, place_doc},
    {"fill_segments", FAST(forest_fill_segments), METH_FASTCALL, fill_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_forest",
    .m_doc = "The forest of host spans, one pass over its rows each.",
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__forest(void)
{
    return PyModuleDef_Init(&module_def);
}
