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
 *
 * The graph of one rank of a job depends on other ranks at the last arrivals at its collectives
 * alone. contract() leaves of it what these see: each moment is the latest of a few (basis, weight),
 * time[basis] + weight, where the basis is the zero of time, a last arrival, or a moment at which
 * more than MOST of them meet, which becomes a basis itself. couple() solves the ranks together.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ABSENT INT64_MIN
#define NEVER (-((int64_t)1 << 62)) /* an edge that decides nothing, see graph.py */
#define MOST 4

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

typedef struct {
    int32_t basis;
    int64_t weight;
} Term;

/* Terms that are gathered for one moment, each basis once; and the records of those before. */
typedef struct {
    Term *term;       /* of the moment */
    int64_t count;
    int32_t *at;      /* by basis: where its term is, where seen[basis] is the moment's mark */
    int64_t *seen;
    int64_t mark;
    int64_t *first;   /* records: terms first[k] .. first[k + 1]; record k is basis k + 1 */
    int32_t *basis;
    int64_t *weight;
    int64_t records, terms, capacity;
} Gathering;

static void
gather(Gathering *g, int32_t basis, int64_t weight)
{
    if (g->seen[basis] != g->mark) {
        g->seen[basis] = g->mark;
        g->at[basis] = (int32_t)g->count;
        g->term[g->count++] = (Term){basis, weight};
    }
    else if (g->term[g->at[basis]].weight < weight)
        g->term[g->at[basis]].weight = weight;
}

/* Drop terms that another one reaches at least: its basis itself waits for theirs, as long. */
static void
prune(Gathering *g)
{
    for (int64_t i = 0; i < g->count; i++) {
        Term by = g->term[i];
        if (by.basis <= 0)
            continue;
        for (int64_t e = g->first[by.basis - 1]; e < g->first[by.basis]; e++) {
            int32_t under = g->basis[e];
            if (g->seen[under] == g->mark &&
                g->term[g->at[under]].weight <= by.weight + g->weight[e])
                g->term[g->at[under]].basis = -1 - under;
        }
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < g->count; i++)
        if (g->term[i].basis >= 0)
            g->term[kept++] = g->term[i];
    g->count = kept;
}

/* Keep the gathered terms as a record; 0 where there is no memory for it. */
static int
keep(Gathering *g)
{
    if (g->terms + g->count > g->capacity) {
        int64_t capacity = 2 * (g->terms + g->count);
        int32_t *basis = realloc(g->basis, (size_t)capacity * sizeof(int32_t));
        if (basis == NULL)
            return 0;
        g->basis = basis;
        int64_t *weight = realloc(g->weight, (size_t)capacity * sizeof(int64_t));
        if (weight == NULL)
            return 0;
        g->weight = weight;
        g->capacity = capacity;
    }
    for (int64_t i = 0; i < g->count; i++) {
        g->basis[g->terms] = g->term[i].basis;
        g->weight[g->terms++] = g->term[i].weight;
    }
    g->first[++g->records] = g->terms;
    return 1;
}

typedef struct {
    const int64_t *first, *weight, *lag, *anchor;
    const int32_t *source, *input;
    int64_t moments, edges, outputs;
    const int64_t *out_first, *out_weight;
    const int32_t *out_source;
    int64_t out_edges;
} Contraction;

/* Records of the bases, whose inputs go to `of`, and then of the outputs; -1 where it is done, -2
 * without memory, else an edge that is not in order. */
static int64_t
contracted(const Contraction *c, Gathering *g, Term *terms, uint8_t *counts, int32_t *of)
{
    int64_t at = 0;
    for (int64_t v = 0; v < c->moments; v++) {
        int64_t last = c->first[v + 1];
        int is_input = c->input[v] >= 0;
        if (c->first[v] != at || last < at || last > c->edges)
            return at;
        g->mark++;
        g->count = 0;
        if (!is_input && at + 1 == last && c->weight[at] > NEVER) { /* most follow one moment */
            int32_t u = c->source[at];
            if (u < 0 || u >= v)
                return at;
            int64_t length = c->weight[at++] + c->lag[v];
            counts[v] = counts[u];
            for (int i = 0; i < counts[u]; i++)
                terms[MOST * v + i] =
                    (Term){terms[MOST * u + i].basis, terms[MOST * u + i].weight + length};
            continue;
        }
        for (; at < last; at++) {
            int32_t u = c->source[at];
            if (u < 0 || u >= v)
                return at;
            if (!is_input && c->weight[at] <= NEVER)
                continue;
            int64_t length = is_input ? 0 : c->weight[at] + c->lag[v];
            for (int i = 0; i < counts[u]; i++)
                gather(g, terms[MOST * u + i].basis, terms[MOST * u + i].weight + length);
        }
        if (g->count == 0 && !is_input)
            gather(g, 0, c->anchor[v]);
        prune(g);
        if (!is_input && g->count <= MOST) {
            memcpy(terms + MOST * v, g->term, (size_t)g->count * sizeof(Term));
            counts[v] = (uint8_t)g->count;
            continue;
        }
        of[g->records] = c->input[v];
        if (!keep(g))
            return -2;
        terms[MOST * v] = (Term){(int32_t)g->records, 0};
        counts[v] = 1;
    }
    if (at != c->edges)
        return at;
    at = 0;
    for (int64_t o = 0; o < c->outputs; o++) {
        if (c->out_first[o] != at || c->out_first[o + 1] < at || c->out_first[o + 1] > c->out_edges)
            return at;
        g->mark++;
        g->count = 0;
        for (; at < c->out_first[o + 1]; at++) {
            int32_t u = c->out_source[at];
            if (u < 0 || u >= c->moments)
                return at;
            for (int i = 0; i < counts[u]; i++)
                gather(g, terms[MOST * u + i].basis, terms[MOST * u + i].weight + c->out_weight[at]);
        }
        prune(g);
        of[g->records] = -1;
        if (!keep(g))
            return -2;
    }
    return -1;
}

static PyObject *
contract(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer b[9];
    static const char *const names[] = {"first", "source", "weight", "lag", "anchor", "input",
                                        "out_first", "out_source", "out_weight"};
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*y*y*", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                          &b[6], &b[7], &b[8]))
        return NULL;
    size_t moments = (size_t)b[4].len / 8, edges = (size_t)b[1].len / 4;
    size_t out_edges = (size_t)b[7].len / 4, outputs = b[6].len < 8 ? 0 : (size_t)b[6].len / 8 - 1;
    size_t counts[] = {moments + 1, edges, edges,   moments,  moments,
                       moments,     outputs + 1, out_edges, out_edges};
    static const size_t items[] = {8, 4, 8, 8, 8, 4, 8, 4, 8};
    PyObject *result = NULL;
    Gathering g = {0};
    Term *terms = NULL;
    uint8_t *count = NULL;
    int32_t *of = NULL;
    int64_t wrong = -2;
    size_t most = moments + outputs + 1;
    if (edges > INT32_MAX || most > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "more than 2^31 moments or edges");
        goto release;
    }
    for (int i = 0; i < 9; i++)
        if (!check(&b[i], items[i], counts[i], names[i]))
            goto release;
    g.term = malloc(most * sizeof(Term));
    g.at = malloc(most * sizeof(int32_t));
    g.seen = calloc(most, sizeof(int64_t));
    g.first = calloc(most + 1, sizeof(int64_t));
    terms = malloc((moments * MOST + 1) * sizeof(Term));
    count = calloc(moments + 1, 1);
    of = malloc(most * sizeof(int32_t));
    if (g.term && g.at && g.seen && g.first && terms && count && of) {
        Contraction c = {b[0].buf, b[2].buf, b[3].buf, b[4].buf, b[1].buf, b[5].buf,
                         (int64_t)moments, (int64_t)edges, (int64_t)outputs,
                         b[6].buf, b[8].buf, b[7].buf, (int64_t)out_edges};
        Py_BEGIN_ALLOW_THREADS
        wrong = contracted(&c, &g, terms, count, of);
        Py_END_ALLOW_THREADS
    }
    if (wrong == -2)
        PyErr_NoMemory();
    else if (wrong >= 0)
        PyErr_Format(PyExc_ValueError, "edge %lld does not come from an earlier moment",
                     (long long)wrong);
    else
        result = Py_BuildValue("y#y#y#y#", (char *)g.first, (Py_ssize_t)(g.records + 1) * 8,
                               (char *)g.basis, (Py_ssize_t)g.terms * 4, (char *)g.weight,
                               (Py_ssize_t)g.terms * 8, (char *)of, (Py_ssize_t)g.records * 4);
release:
    free(g.term);
    free(g.at);
    free(g.seen);
    free(g.first);
    free(g.basis);
    free(g.weight);
    free(terms);
    free(count);
    free(of);
    for (int i = 0; i < 9; i++)
        PyBuffer_Release(&b[i]);
    return result;
}

typedef struct {
    const int64_t *of_rank, *first, *weight, *late;
    const int32_t *basis, *instance;
    int64_t ranks, records, terms, instances;
    int64_t *ready, *time;
    int64_t *missing, *at; /* arrivals to come, by instance; the record of each rank */
    int32_t *queue, *next, *head, *arrived;
} Coupling;

/* Go on with a rank until it waits for others; whether the records are in order. */
static int
advance(const Coupling *c, int32_t rank, int64_t *queued)
{
    int64_t base = c->of_rank[rank] - 1;
    for (; c->at[rank] < c->of_rank[rank + 1]; c->at[rank]++) {
        int64_t n = c->at[rank], reached = ABSENT;
        for (int64_t e = c->first[n]; e < c->first[n + 1]; e++) {
            int32_t k = c->basis[e];
            if (k < 0 || base + k >= n)
                return 0;
            int64_t from = k == 0 ? 0 : c->time[base + k];
            if (from != ABSENT && from + c->weight[e] > reached)
                reached = from + c->weight[e];
        }
        int32_t i = c->instance[n];
        if (i < 0) {
            c->time[n] = reached;
            continue;
        }
        if (i >= c->instances)
            return 0;
        if (!c->arrived[rank]) {
            c->arrived[rank] = 1;
            if (reached != ABSENT && reached + c->late[n] > c->ready[i])
                c->ready[i] = reached + c->late[n];
            if (--c->missing[i] == 0)
                for (int32_t *r = &c->head[i]; *r >= 0; *r = c->next[*r])
                    c->queue[(*queued)++] = *r;
        }
        if (c->missing[i] > 0) {
            c->next[rank] = c->head[i];
            c->head[i] = rank;
            return 1;
        }
        c->arrived[rank] = 0;
        c->time[n] = c->ready[i];
    }
    return 1;
}

/* Where ranks meet in orders that contradict each other, the earliest collective does not wait. */
static int64_t
earliest_open(const Coupling *c)
{
    int64_t open = -1;
    for (int64_t i = 0; i < c->instances; i++)
        if (c->head[i] >= 0 && c->missing[i] > 0 &&
            (open < 0 || c->ready[i] < c->ready[open]))
            open = i;
    return open;
}

/* How many collectives did not wait for all; -1 where records are not in order. */
static int64_t
coupled(const Coupling *c)
{
    int64_t queued = 0, open = 0, left = 0;
    for (int64_t n = 0; n < c->records; n++)
        if (c->instance[n] >= 0 && c->instance[n] < c->instances)
            c->missing[c->instance[n]]++;
    for (int64_t i = 0; i < c->instances; i++) {
        c->ready[i] = ABSENT;
        c->head[i] = -1;
    }
    for (int64_t rank = c->ranks - 1; rank >= 0; rank--) {
        c->at[rank] = c->of_rank[rank];
        c->queue[queued++] = (int32_t)rank;
    }
    for (;;) {
        while (queued > 0)
            if (!advance(c, c->queue[--queued], &queued))
                return -1;
        if ((open = earliest_open(c)) < 0)
            return left;
        left++;
        c->missing[open] = 0;
        for (int32_t *r = &c->head[open]; *r >= 0; *r = c->next[*r])
            c->queue[queued++] = *r;
    }
}

static PyObject *
couple(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer b[8];
    static const char *const names[] = {"of_rank", "first",    "basis", "weight",
                                        "instance", "late", "ready", "time"};
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*w*w*", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                          &b[6], &b[7]))
        return NULL;
    size_t ranks = b[0].len < 8 ? 0 : (size_t)b[0].len / 8 - 1, records = (size_t)b[7].len / 8;
    size_t terms = (size_t)b[2].len / 4, instances = (size_t)b[6].len / 8;
    size_t counts[] = {ranks + 1, records + 1, terms, terms, records, records, instances, records};
    static const size_t items[] = {8, 8, 4, 8, 4, 8, 8, 8};
    PyObject *result = NULL;
    Coupling c = {b[0].buf, b[1].buf, b[3].buf, b[5].buf, b[2].buf, b[4].buf, (int64_t)ranks,
                  (int64_t)records, (int64_t)terms, (int64_t)instances, b[6].buf, b[7].buf,
                  NULL, NULL, NULL, NULL, NULL, NULL};
    int64_t left = -1;
    for (int i = 0; i < 8; i++)
        if (!check(&b[i], items[i], counts[i], names[i]))
            goto release;
    for (size_t r = 0; r < ranks; r++)
        if (c.of_rank[r] > c.of_rank[r + 1] || c.of_rank[0] != 0)
            goto wrong;
    if (ranks == 0 || c.of_rank[ranks] != c.records || ranks > INT32_MAX)
        goto wrong;
    for (size_t n = 0; n < records; n++)
        if (c.first[n] > c.first[n + 1] || c.first[0] != 0)
            goto wrong;
    if (c.first[records] != c.terms)
        goto wrong;
    c.missing = calloc(instances + 1, 8);
    c.at = calloc(ranks + 1, 8);
    c.queue = calloc(2 * ranks + 1, 4);
    c.next = calloc(ranks + 1, 4);
    c.head = calloc(instances + 1, 4);
    c.arrived = calloc(ranks + 1, 4);
    if (!(c.missing && c.at && c.queue && c.next && c.head && c.arrived)) {
        PyErr_NoMemory();
        goto release;
    }
    Py_BEGIN_ALLOW_THREADS
    left = coupled(&c);
    Py_END_ALLOW_THREADS
    if (left >= 0) {
        result = PyLong_FromLongLong((long long)left);
        goto release;
    }
wrong:
    PyErr_SetString(PyExc_ValueError, "records of ranks that are not in order");
release:
    free(c.missing);
    free(c.at);
    free(c.queue);
    free(c.next);
    free(c.head);
    free(c.arrived);
    for (int i = 0; i < 8; i++)
        PyBuffer_Release(&b[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"longest", longest, METH_VARARGS,
     "longest(first, source, weight, lag, anchor, time, decided)\n--\n\nSee _longest.pyi."},
    {"contract", contract, METH_VARARGS,
     "contract(first, source, weight, lag, anchor, input, out_first, out_source, out_weight)\n"
     "--\n\nSee _longest.pyi."},
    {"couple", couple, METH_VARARGS,
     "couple(of_rank, first, basis, weight, instance, late, ready, time)\n--\n\n"
     "See _longest.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_longest",
    .m_doc = "The longest-path passes of a replay.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__longest(void)
{
    return PyModuleDef_Init(&definition);
}
