/*
 * The longest-path pass of a replay: when each moment of a schedule comes, given what it waits for.
 *
 * Moments are numbered so that each waits only for moments before it; the edges that enter moment v
 * are first[v] <= e < first[v + 1], from source[e], and take weight[e]:
 *
 *     time[v] = max over e (time[source[e]] + weight[e]) + lag[v]
 *
 * and time[v] = anchor[v] where no edge enters. An edge of weight INT64_MIN is not there. Beside
 * the times comes, where wanted, the edge that decided each moment (-1 for none), and with it the
 * critical path. Arrays are contiguous; their lengths are checked, their numbers by the caller's
 * construction and here: an edge that does not come from an earlier moment is refused. Sums that
 * overflow wrap around, as numpy's do.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#define ABSENT INT64_MIN

static int
check(const Py_buffer *buffer, size_t item, size_t count, const char *name)
{
    if ((size_t)buffer->len == item * count)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, expected %zu", name, buffer->len, item * count);
    return 0;
}

/* The first edge that is not in order, -1 for none. */
static int64_t
pass(const int64_t *first, const int32_t *source, const int64_t *weight, const int64_t *lag,
     const int64_t *anchor, int64_t *time, int32_t *decided, int64_t moments, int64_t edges)
{
    int64_t at = 0;
    for (int64_t v = 0; v < moments; v++) {
        int64_t last = first[v + 1];
        if (first[v] != at || last < at || last > edges)
            return at;
        int64_t best = ABSENT;
        int32_t by = -1;
        for (; at < last; at++) {
            int32_t u = source[at];
            if (u < 0 || u >= v)
                return at;
            if (weight[at] == ABSENT)
                continue;
            int64_t reached = (int64_t)((uint64_t)time[u] + (uint64_t)weight[at]);
            if (reached > best) {
                best = reached;
                by = (int32_t)at;
            }
        }
        time[v] = by < 0 ? anchor[v] : (int64_t)((uint64_t)best + (uint64_t)lag[v]);
        if (decided != NULL)
            decided[v] = by;
    }
    return at == edges ? -1 : at;
}

static PyObject *
longest(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer first, source, weight, lag, anchor, time, decided;
    PyObject *wanted;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*w*O", &first, &source, &weight, &lag, &anchor, &time,
                          &wanted))
        return NULL;
    int with = wanted != Py_None;
    PyObject *result = NULL;
    if (with && PyObject_GetBuffer(wanted, &decided, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
        with = 0;
        goto release;
    }
    size_t moments = (size_t)time.len / 8, edges = (size_t)source.len / 4;
    if (edges > INT32_MAX || moments > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "more than 2^31 moments or edges");
        goto release;
    }
    if (!check(&first, 8, moments + 1, "first") || !check(&source, 4, edges, "source") ||
        !check(&weight, 8, edges, "weight") || !check(&lag, 8, moments, "lag") ||
        !check(&anchor, 8, moments, "anchor") || !check(&time, 8, moments, "time") ||
        (with && !check(&decided, 4, moments, "decided")))
        goto release;
    int64_t wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = pass(first.buf, source.buf, weight.buf, lag.buf, anchor.buf, time.buf,
                 with ? decided.buf : NULL, (int64_t)moments, (int64_t)edges);
    Py_END_ALLOW_THREADS
    if (wrong >= 0) {
        PyErr_Format(PyExc_ValueError, "edge %lld does not come from an earlier moment",
                     (long long)wrong);
        goto release;
    }
    result = Py_NewRef(Py_None);
release:
    if (with)
        PyBuffer_Release(&decided);
    PyBuffer_Release(&first);
    PyBuffer_Release(&source);
    PyBuffer_Release(&weight);
    PyBuffer_Release(&lag);
    PyBuffer_Release(&anchor);
    PyBuffer_Release(&time);
    return result;
}

static PyMethodDef methods[] = {
    {"longest", longest, METH_VARARGS,
     "longest(first, source, weight, lag, anchor, time, decided)\n--\n\nSee _longest.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_longest",
    .m_doc = "The longest-path pass of a replay.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__longest(void)
{
    return PyModuleDef_Init(&definition);
}
