/*
 * Scanner of trace events in JSON: text goes in piece by piece, columns come out.
 *
 * It knows JSON and the shape of trace events; which arguments are kept and which categories are
 * wanted, its caller says (_native.py). It accepts only what leaves no doubt: strict JSON, with
 * members of the expected types and times of at most three decimals. Anything else it refuses,
 * with the place and the reason, and the caller reads the file another way; a single event that is
 * refused may also be replaced, and scanning goes on behind it. So a text that is accepted means
 * the same here as to any strict parser.
 *
 * Text is scanned without the GIL. Nothing is read beyond the piece that was passed: an event that
 * is cut off at the end of a piece is left to the next one.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_scan_json.h"

#define MAX_ARGS 64
#define MAX_GROUPS 8
#define MAX_COLUMNS 32
#define KEY_SLOTS 256 /* a power of two, several times MAX_ARGS */

/* Flags of a row. */
#define WITHOUT_TS 1
#define WITHOUT_DUR 2
#define OVERFLOWING_DUR 4
#define WITHOUT_NAME 8

/* ------------------------------------------------------------------ events */

typedef enum { ABSENT, NOTHING, INTEGER, REAL, STRING, ANY } Kind;

typedef struct {
    uint64_t attempt; /* that read it: an argument of an earlier event is absent */
    Kind kind;
    Slice text; /* as it stands in the file; a string without its quotes */
    Number number;
} Value;

/* What an argument may be. */
typedef enum { ARG_NUMBER, ARG_STRING, ARG_ANY } ArgKind;

typedef struct {
    Slice ph, cat, name;
    bool has_cat, has_name, has_args;
    Value pid, tid, ts, dur;
    Slice text;
} Event;

typedef struct {
    Slice key; /* owned */
    ArgKind kind;
} Arg;

typedef struct {
    int group; /* or SKIPPED, REFUSED */
    uint8_t code;
    bool shows_marked;
} Category;

#define SKIPPED (-1)
#define REFUSED (-2)

/* Columns that all groups have. */
enum { TS, DUR, PID, TID, NAME, CODE, FLAGS, PLACE, FIXED_COLUMNS };
static const char FIXED_TYPES[FIXED_COLUMNS + 1] = "qqqqiBBi";

typedef struct {
    int int_count, text_count;
    int ints[MAX_COLUMNS], texts[MAX_COLUMNS]; /* arguments */
    Vec columns[FIXED_COLUMNS + 2 * MAX_COLUMNS];
    size_t rows, capacity;
} Group;

/* Events that the caller decodes itself. */
typedef struct {
    Vec text; /* without the brackets */
    Vec rows; /* int64: group << 56 | row */
} Shown;

enum { METADATA, COUNTERS, MARKED, SHOWN };

typedef enum {
    AT_START,
    AT_FIRST_MEMBER,
    AT_MEMBER,
    AFTER_MEMBER,
    AT_FIRST_EVENT,
    AT_EVENT,
    AFTER_EVENT,
    AT_END
} State;

/* A state, and what must be known beside it to go on from there. */
#define STATE_BITS 7
#define IS_LIST 8
#define HAS_EVENTS 16

typedef struct {
    PyObject_HEAD
    /* What is wanted. */
    Arg args[MAX_ARGS];
    int arg_count, marked_arg;
    uint8_t key_slots[KEY_SLOTS]; /* argument + 1, by hash of its key */
    Interner categories;
    Vec category_of; /* Category, by code - 1 */
    Slice instant;   /* owned; name of the instants that are wanted */
    int instant_group;
    /* What was found. */
    Group groups[MAX_GROUPS];
    int group_count;
    Interner names, texts, ids;
    Shown shown[SHOWN];
    Vec header;
    int64_t without_category;
    /* Where it stands. */
    State state;
    bool is_list, has_events, busy, finished;
    uint64_t attempt, event_count, consumed;
    Py_ssize_t refused_at; /* start in the last piece of an event that was refused; else -1 */
    Value values[MAX_ARGS];
} Scanner;

static bool
equals(const Slice *slice, const char *word, size_t length)
{
    return slice->length == length && memcmp(slice->at, word, length) == 0;
}

/* A number, a string or null. */
static Status
scalar(Cursor *c, Value *value)
{
    TRY(blanks(c));
    const uint8_t *start = c->at;
    if (*start == '"') {
        value->kind = STRING;
        return string(c, &value->text);
    }
    if (*start == 'n') {
        value->kind = NOTHING;
        return literal(c, "null");
    }
    TRY(number(c, &value->number));
    value->kind = value->number.integer ? INTEGER : REAL;
    value->text = (Slice){start, (size_t)(c->at - start), false};
    return OK;
}

static Status
any(Cursor *c, Value *value)
{
    TRY(blanks(c));
    const uint8_t *start = c->at;
    TRY(skip(c, 2));
    value->kind = ANY;
    value->text = (Slice){start, (size_t)(c->at - start), false};
    return OK;
}

/* A string or null. */
static Status
text_or_null(Cursor *c, Slice *text, bool *present)
{
    TRY(blanks(c));
    *present = *c->at != 'n';
    return *present ? string(c, text) : literal(c, "null");
}

static int
find_arg(const Scanner *s, const Slice *key)
{
    size_t slot = hash_of(key->at, key->length) & (KEY_SLOTS - 1);
    for (; s->key_slots[slot]; slot = (slot + 1) & (KEY_SLOTS - 1)) {
        int arg = s->key_slots[slot] - 1;
        if (s->args[arg].key.length == key->length
            && memcmp(s->args[arg].key.at, key->at, key->length) == 0)
            return arg;
    }
    return -1;
}

static Status
argument(Scanner *s, Cursor *c)
{
    Slice key;
    TRY(blanks(c));
    TRY(string(c, &key));
    if (key.escaped)
        return bad(c, "an escape in a key");
    TRY(expect(c, ':', "expected : after a key"));
    int arg = find_arg(s, &key);
    if (arg < 0)
        return skip(c, 2);
    Value *value = &s->values[arg];
    value->attempt = s->attempt;
    if (s->args[arg].kind == ARG_ANY)
        return any(c, value);
    TRY(scalar(c, value));
    if (s->args[arg].kind == ARG_STRING && value->kind != STRING && value->kind != NOTHING)
        return bad(c, "expected a string");
    return OK;
}

static Status
arguments(Scanner *s, Cursor *c, Event *event)
{
    TRY(blanks(c));
    if (event->has_args) {
        /* A second "args" replaces the first. */
        for (int i = 0; i < s->arg_count; i++)
            s->values[i].attempt = 0;
    }
    event->has_args = true;
    if (*c->at == 'n')
        return literal(c, "null");
    TRY(expect(c, '{', "expected an object of arguments"));
    TRY(blanks(c));
    if (*c->at == '}') {
        c->at++;
        return OK;
    }
    for (;;) {
        TRY(argument(s, c));
        TRY(blanks(c));
        if (*c->at == '}') {
            c->at++;
            return OK;
        }
        TRY(expect(c, ',', "expected , or } after an argument"));
    }
}

static Status
member(Scanner *s, Cursor *c, Event *event)
{
    Slice key;
    TRY(blanks(c));
    TRY(string(c, &key));
    if (key.escaped)
        return bad(c, "an escape in a key");
    TRY(expect(c, ':', "expected : after a key"));
    switch (key.length) {
    case 2:
        if (equals(&key, "ph", 2)) {
            TRY(blanks(c));
            return string(c, &event->ph);
        }
        if (equals(&key, "ts", 2))
            return scalar(c, &event->ts);
        break;
    case 3:
        if (equals(&key, "cat", 3))
            return text_or_null(c, &event->cat, &event->has_cat);
        if (equals(&key, "dur", 3))
            return scalar(c, &event->dur);
        if (equals(&key, "pid", 3))
            return scalar(c, &event->pid);
        if (equals(&key, "tid", 3))
            return scalar(c, &event->tid);
        break;
    case 4:
        if (equals(&key, "name", 4))
            return text_or_null(c, &event->name, &event->has_name);
        if (equals(&key, "args", 4))
            return arguments(s, c, event);
        break;
    default:
        break;
    }
    return skip(c, 1);
}

/* ------------------------------------------------------------------ rows */

/* Microseconds as integer nanoseconds, from their digits. */
static bool
nanoseconds(const Number *n, int64_t *found)
{
    if (n->whole > (INT64_MAX - 999) / 1000)
        return false;
    *found = (int64_t)n->whole * 1000 + n->thousandths;
    if (n->negative)
        *found = -*found;
    return true;
}

/* The number that a time is, also within quotes. */
static Status
time_of(Cursor *c, const Value *value, Number *n)
{
    *n = value->number;
    if (value->kind == STRING) {
        /* The closing quote ends the number. */
        Cursor inner = {value->text.at, value->text.at + value->text.length + 1, NULL};
        if (number(&inner, n) != OK || inner.at != value->text.at + value->text.length)
            return bad(c, "a time that is no number");
    }
    return n->inexact ? bad(c, "a time with an exponent or more than three decimals") : OK;
}

static Status
times(Cursor *c, const Event *event, int64_t *ts, int64_t *dur, uint8_t *flags)
{
    Number n;
    *ts = *dur = 0;
    if (event->ts.kind <= NOTHING) {
        *flags |= WITHOUT_TS;
    } else {
        TRY(time_of(c, &event->ts, &n));
        if (!nanoseconds(&n, ts))
            return bad(c, "a ts beyond 64 bits of nanoseconds");
    }
    if (event->dur.kind <= NOTHING) {
        *flags |= WITHOUT_DUR;
    } else {
        TRY(time_of(c, &event->dur, &n));
        if (!nanoseconds(&n, dur))
            *flags |= OVERFLOWING_DUR;
    }
    return OK;
}

/* A process or thread: an integer, or the code of a string. */
static Status
id_of(Scanner *s, Cursor *c, const Value *value, int64_t *found)
{
    int32_t code;
    switch (value->kind) {
    case INTEGER:
        return as_integer(&value->number, found) ? OK : bad(c, "an id beyond 64 bits");
    case STRING:
        TRY(intern(&s->ids, value->text.at, value->text.length, &code));
        *found = ID_STRINGS + code;
        return OK;
    case ABSENT:
    case NOTHING:
        *found = -1;
        return OK;
    default:
        return bad(c, "an id that is no integer");
    }
}

/* An integer argument, also within quotes. */
static Status
int_of(const Scanner *s, Cursor *c, int arg, int64_t *found)
{
    const Value *value = &s->values[arg];
    *found = NO_VALUE;
    if (value->attempt != s->attempt || value->kind <= NOTHING)
        return OK;
    Number n = value->number;
    if (value->kind == STRING) {
        Cursor inner = {value->text.at, value->text.at + value->text.length + 1, NULL};
        if (number(&inner, &n) != OK || inner.at != value->text.at + value->text.length)
            return bad(c, "an argument that is no integer");
    }
    return as_integer(&n, found) ? OK : bad(c, "an argument that is no integer of 64 bits");
}

/* The code of an argument's text, quotes included; 0 when it is absent. */
static Status
text_of(Scanner *s, int arg, int32_t *code)
{
    const Value *value = &s->values[arg];
    *code = 0;
    if (value->attempt != s->attempt || value->kind <= NOTHING)
        return OK;
    bool quoted = value->kind == STRING;
    return intern(&s->texts, value->text.at - quoted, value->text.length + 2 * quoted, code);
}

static Status
group_reserve(Group *group)
{
    if (group->rows < group->capacity)
        return OK;
    int count = FIXED_COLUMNS + group->int_count + group->text_count;
    for (int i = 0; i < count; i++) {
        Vec *column = &group->columns[i];
        column->count = group->rows;
        TRY(vec_reserve(column, 1));
    }
    group->capacity = group->columns[TS].capacity;
    return OK;
}

#define PUT(type, column, value) (((type *)(void *)group->columns[column].data)[row] = (value))

static Status
append(Scanner *s, Cursor *c, const Event *event, Group *group, uint8_t code)
{
    int64_t ts, dur, pid, tid;
    int32_t name = 0;
    uint8_t flags = 0;
    TRY(times(c, event, &ts, &dur, &flags));
    TRY(id_of(s, c, &event->pid, &pid));
    TRY(id_of(s, c, &event->tid, &tid));
    if (event->has_name)
        TRY(intern(&s->names, event->name.at, event->name.length, &name));
    else
        flags |= WITHOUT_NAME;
    TRY(group_reserve(group));
    size_t row = group->rows;
    PUT(int64_t, TS, ts);
    PUT(int64_t, DUR, dur);
    PUT(int64_t, PID, pid);
    PUT(int64_t, TID, tid);
    PUT(int32_t, NAME, name);
    PUT(uint8_t, CODE, code);
    PUT(uint8_t, FLAGS, flags);
    PUT(int32_t, PLACE, (int32_t)s->event_count);
    int column = FIXED_COLUMNS;
    for (int i = 0; i < group->int_count; i++, column++) {
        int64_t found;
        TRY(int_of(s, c, group->ints[i], &found));
        PUT(int64_t, column, found);
    }
    for (int i = 0; i < group->text_count; i++, column++) {
        int32_t found;
        TRY(text_of(s, group->texts[i], &found));
        PUT(int32_t, column, found);
    }
    group->rows++;
    return OK;
}

static Status
show(Shown *shown, const Event *event, const int64_t *row)
{
    if (shown->text.count)
        TRY(vec_append(&shown->text, ",", 1));
    TRY(vec_append(&shown->text, event->text.at, event->text.length));
    return row ? vec_append(&shown->rows, row, 1) : OK;
}

/* A span: a row of its category's group. */
static Status
span(Scanner *s, Cursor *c, const Event *event)
{
    int32_t code;
    if (!event->has_cat) {
        s->without_category++;
        return OK;
    }
    if (event->cat.escaped)
        return bad(c, "an escape in a category");
    int32_t known = (int32_t)s->categories.texts.count;
    TRY(intern(&s->categories, event->cat.at, event->cat.length, &code));
    if (code > known) {
        Category unknown = {SKIPPED, 0, false};
        TRY(vec_append(&s->category_of, &unknown, 1));
    }
    Category category = ((Category *)(void *)s->category_of.data)[code - 1];
    if (category.group == SKIPPED)
        return OK;
    if (category.group == REFUSED)
        return bad(c, "a category that is read another way");
    Group *group = &s->groups[category.group];
    if (category.shows_marked && s->marked_arg >= 0) {
        const Value *mark = &s->values[s->marked_arg];
        if (mark->attempt == s->attempt && mark->kind > NOTHING) {
            int64_t row = (int64_t)category.group << 56 | (int64_t)group->rows;
            TRY(show(&s->shown[MARKED], event, &row));
        }
    }
    return append(s, c, event, group, category.code);
}

static Status
metadata(Scanner *s, Cursor *c, const Event *event)
{
    int64_t pid, tid;
    /* Strings among ids are numbered in their order in the file, whoever has them. */
    TRY(id_of(s, c, &event->pid, &pid));
    TRY(id_of(s, c, &event->tid, &tid));
    return show(&s->shown[METADATA], event, NULL);
}

static Status
counters(Scanner *s, Cursor *c, const Event *event)
{
    int64_t ts, dur;
    uint8_t flags = 0;
    /* Only those times are accepted that all readers round alike. */
    TRY(times(c, event, &ts, &dur, &flags));
    return show(&s->shown[COUNTERS], event, NULL);
}

static Status
keep(Scanner *s, Cursor *c, const Event *event)
{
    if (event->ph.escaped)
        return bad(c, "an escape in a phase");
    if (event->ph.length != 1)
        return OK;
    switch (event->ph.at[0]) {
    case 'X':
        return span(s, c, event);
    case 'i':
        if (!event->has_name)
            return OK;
        if (event->name.escaped)
            return bad(c, "an escape in the name of an instant");
        if (event->name.length != s->instant.length
            || memcmp(event->name.at, s->instant.at, s->instant.length) != 0)
            return OK;
        return append(s, c, event, &s->groups[s->instant_group], 0);
    case 'M':
        return metadata(s, c, event);
    case 'C':
        return counters(s, c, event);
    case 'B':
    case 'E':
        return bad(c, "a span in two events");
    default:
        return OK;
    }
}

/* One event; on MORE nothing of it is kept. */
static Status
read_event(Scanner *s, Cursor *c)
{
    Event event;
    event.text.at = c->at;
    event.ph = (Slice){c->at, 0, false};
    event.has_cat = event.has_name = event.has_args = false;
    event.pid.kind = event.tid.kind = event.ts.kind = event.dur.kind = ABSENT;
    /* Arguments of earlier events are absent from here on. */
    s->attempt++;
    if (s->event_count == INT32_MAX)
        return bad(c, "more events than are counted here");
    Status status = expect(c, '{', "expected an event");
    if (status == OK)
        status = blanks(c);
    if (status == OK && *c->at == '}') {
        c->at++;
    } else {
        while (status == OK) {
            status = member(s, c, &event);
            if (status == OK)
                status = blanks(c);
            if (status == OK && *c->at == '}') {
                c->at++;
                break;
            }
            if (status == OK)
                status = expect(c, ',', "expected , or } after a member");
        }
    }
    if (status == OK) {
        event.text.length = (size_t)(c->at - event.text.at);
        status = keep(s, c, &event);
        s->event_count += status == OK;
    }
    return status;
}

/* ------------------------------------------------------------------ the text around the events */

/* A member beside the events is kept as text. */
static Status
read_member(Scanner *s, Cursor *c)
{
    Slice key;
    const uint8_t *start = c->at;
    TRY(string(c, &key));
    if (key.escaped)
        return bad(c, "an escape in a key");
    TRY(expect(c, ':', "expected : after a key"));
    if (equals(&key, "traceEvents", 11)) {
        TRY(expect(c, '[', "expected a list of events"));
        if (s->has_events)
            return bad(c, "a second list of events");
        s->has_events = true;
        s->state = AT_FIRST_EVENT;
        return OK;
    }
    TRY(skip(c, 1));
    if (s->header.count)
        TRY(vec_append(&s->header, ",", 1));
    TRY(vec_append(&s->header, start, (size_t)(c->at - start)));
    s->state = AFTER_MEMBER;
    return OK;
}

static Status
step(Scanner *s, Cursor *c)
{
    TRY(blanks(c));
    uint8_t next = *c->at;
    switch (s->state) {
    case AT_START:
        if (next == '[')
            s->is_list = s->has_events = true;
        else if (next != '{')
            return bad(c, "expected an object or a list");
        s->state = next == '[' ? AT_FIRST_EVENT : AT_FIRST_MEMBER;
        c->at++;
        return OK;
    case AT_FIRST_MEMBER:
        if (next != '}')
            return read_member(s, c);
        s->state = AT_END;
        c->at++;
        return OK;
    case AT_MEMBER:
        return read_member(s, c);
    case AFTER_MEMBER:
        if (next != ',' && next != '}')
            return bad(c, "expected , or } after a member");
        s->state = next == ',' ? AT_MEMBER : AT_END;
        c->at++;
        return OK;
    case AT_FIRST_EVENT:
        if (next == ']') {
            s->state = s->is_list ? AT_END : AFTER_MEMBER;
            c->at++;
            return OK;
        }
        /* fall through */
    case AT_EVENT:
        TRY(read_event(s, c));
        s->state = AFTER_EVENT;
        return OK;
    case AFTER_EVENT:
        if (next == ',')
            s->state = AT_EVENT;
        else if (next == ']')
            s->state = s->is_list ? AT_END : AFTER_MEMBER;
        else
            return bad(c, "expected , or ] after an event");
        c->at++;
        return OK;
    case AT_END:
    default:
        return bad(c, "text after the end");
    }
}

static Status
scan(Scanner *s, Cursor *c)
{
    const uint8_t *start = c->at;
    for (;;) {
        const uint8_t *resume = c->at;
        Status status = step(s, c);
        if (status != OK) {
            if (status == MORE) {
                /* Blanks need not be seen again. */
                c->at = resume;
                (void)blanks(c);
            } else if (s->state == AT_FIRST_EVENT || s->state == AT_EVENT) {
                Cursor event = {resume, c->end, NULL};
                if (blanks(&event) == OK && *event.at == '{')
                    s->refused_at = event.at - start;
            }
            return status;
        }
    }
}

/* ------------------------------------------------------------------ Python: columns */

typedef struct {
    PyObject_HEAD
    void *data;
    Py_ssize_t count, size;
    char format[2];
} Column;

static int
column_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    Column *self = (Column *)object;
    static char nothing;
    if (PyBuffer_FillInfo(view, object, self->data ? self->data : &nothing,
                          self->count * self->size, 0, flags) < 0)
        return -1;
    view->itemsize = self->size;
    if (flags & PyBUF_FORMAT)
        view->format = self->format;
    if (view->shape != NULL)
        view->shape = &self->count;
    if (view->strides != NULL)
        view->strides = &self->size;
    return 0;
}

static void
column_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    free(((Column *)object)->data);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot column_slots[] = {
    {Py_tp_doc, "A column of numbers; numpy.asarray wraps it without a copy."},
    {Py_tp_dealloc, column_dealloc},
    {Py_bf_getbuffer, column_getbuffer},
    {0, NULL},
};

static PyType_Spec column_spec = {
    .name = "chopper.collectors.formats.kineto._scan.Column",
    .basicsize = sizeof(Column),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = column_slots,
};

typedef struct {
    PyObject *column_type, *refused;
} Module;

/* A column that owns the memory of a vector from now on. */
static PyObject *
column_of(const Module *module, Vec *vec, size_t count, char format)
{
    PyTypeObject *type = (PyTypeObject *)module->column_type;
    Column *column = (Column *)PyType_GenericAlloc(type, 0);
    if (column == NULL)
        return NULL;
    column->data = vec->data;
    column->count = (Py_ssize_t)count;
    column->size = (Py_ssize_t)vec->size;
    column->format[0] = format;
    vec->data = NULL;
    vec->count = vec->capacity = 0;
    return (PyObject *)column;
}

/* ------------------------------------------------------------------ Python: the scanner */

static bool
own(Slice *slice, PyObject *bytes)
{
    size_t length = (size_t)PyBytes_Size(bytes);
    uint8_t *copy = malloc(length ? length : 1);
    if (copy == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(copy, PyBytes_AsString(bytes), length);
    *slice = (Slice){copy, length, false};
    return true;
}

static bool
set_args(Scanner *s, PyObject *args)
{
    Py_ssize_t count = PyTuple_Size(args);
    if (count > MAX_ARGS) {
        PyErr_Format(PyExc_ValueError, "%zd arguments, at most %d", count, MAX_ARGS);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key;
        int kind;
        if (!PyArg_ParseTuple(PyTuple_GetItem(args, i), "Si", &key, &kind))
            return false;
        if (kind < ARG_NUMBER || kind > ARG_ANY) {
            PyErr_Format(PyExc_ValueError, "argument kind %d", kind);
            return false;
        }
        Arg *arg = &s->args[i];
        if (!own(&arg->key, key))
            return false;
        arg->kind = (ArgKind)kind;
        s->arg_count++;
        size_t slot = hash_of(arg->key.at, arg->key.length) & (KEY_SLOTS - 1);
        while (s->key_slots[slot])
            slot = (slot + 1) & (KEY_SLOTS - 1);
        s->key_slots[slot] = (uint8_t)(i + 1);
    }
    return true;
}

static bool
set_columns(const Scanner *s, PyObject *listed, int *into, int *count)
{
    Py_ssize_t given = PyTuple_Size(listed);
    if (given > MAX_COLUMNS) {
        PyErr_Format(PyExc_ValueError, "%zd columns, at most %d", given, MAX_COLUMNS);
        return false;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        long arg = PyLong_AsLong(PyTuple_GetItem(listed, i));
        if (arg < 0 || arg >= s->arg_count) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "no argument %ld", arg);
            return false;
        }
        into[i] = (int)arg;
    }
    *count = (int)given;
    return true;
}

static size_t
size_of(char format)
{
    return format == 'q' ? 8 : format == 'i' ? 4 : 1;
}

static bool
set_groups(Scanner *s, PyObject *groups)
{
    Py_ssize_t count = PyTuple_Size(groups);
    if (count > MAX_GROUPS) {
        PyErr_Format(PyExc_ValueError, "%zd groups, at most %d", count, MAX_GROUPS);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *ints, *texts;
        Group *group = &s->groups[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(groups, i), "O!O!", &PyTuple_Type, &ints,
                              &PyTuple_Type, &texts)
            || !set_columns(s, ints, group->ints, &group->int_count)
            || !set_columns(s, texts, group->texts, &group->text_count))
            return false;
        int column = 0;
        for (; column < FIXED_COLUMNS; column++)
            group->columns[column].size = size_of(FIXED_TYPES[column]);
        for (int j = 0; j < group->int_count; j++)
            group->columns[column++].size = size_of('q');
        for (int j = 0; j < group->text_count; j++)
            group->columns[column++].size = size_of('i');
        s->group_count++;
    }
    return true;
}

static bool
set_categories(Scanner *s, PyObject *categories)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(categories); i++) {
        PyObject *name;
        int group, code, shows_marked;
        int32_t found;
        if (!PyArg_ParseTuple(PyTuple_GetItem(categories, i), "Siip", &name, &group, &code,
                              &shows_marked))
            return false;
        if (group < REFUSED || group >= s->group_count || code < 0 || code > UINT8_MAX) {
            PyErr_Format(PyExc_ValueError, "category %R: group %d, code %d", name, group, code);
            return false;
        }
        Category category = {group, (uint8_t)code, shows_marked != 0};
        if (intern(&s->categories, (const uint8_t *)PyBytes_AsString(name),
                   (size_t)PyBytes_Size(name), &found)
            || vec_append(&s->category_of, &category, 1)) {
            PyErr_NoMemory();
            return false;
        }
        if (s->categories.texts.count != s->category_of.count) {
            PyErr_Format(PyExc_ValueError, "category %R twice", name);
            return false;
        }
    }
    return true;
}

static PyObject *
scanner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"args",    "groups",        "categories", "marked",
                            "instant", "instant_group", "state",      NULL};
    PyObject *known, *groups, *categories, *instant;
    int marked, instant_group, state = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!iSi|i:Scanner", names, &PyTuple_Type,
                                     &known, &PyTuple_Type, &groups, &PyTuple_Type, &categories,
                                     &marked, &instant, &instant_group, &state))
        return NULL;
    if (state < 0 || state > (STATE_BITS | IS_LIST | HAS_EVENTS) || (state & STATE_BITS) > AT_END) {
        PyErr_Format(PyExc_ValueError, "state %d", state);
        return NULL;
    }
    Scanner *s = (Scanner *)PyType_GenericAlloc(type, 0); /* all zero */
    if (s == NULL)
        return NULL;
    interner_init(&s->categories);
    interner_init(&s->names);
    interner_init(&s->texts);
    interner_init(&s->ids);
    s->state = (State)(state & STATE_BITS);
    s->refused_at = -1;
    s->is_list = (state & IS_LIST) != 0;
    s->has_events = (state & HAS_EVENTS) != 0;
    s->category_of.size = sizeof(Category);
    s->header.size = 1;
    for (int i = 0; i < SHOWN; i++) {
        s->shown[i].text.size = 1;
        s->shown[i].rows.size = sizeof(int64_t);
    }
    s->marked_arg = marked;
    s->instant_group = instant_group;
    if (!set_args(s, known) || !set_groups(s, groups) || !set_categories(s, categories)
        || !own(&s->instant, instant))
        goto failed;
    if (marked < -1 || marked >= s->arg_count || instant_group < 0
        || instant_group >= s->group_count) {
        PyErr_SetString(PyExc_ValueError, "marked or instant_group out of range");
        goto failed;
    }
    return (PyObject *)s;
failed:
    Py_DECREF(s);
    return NULL;
}

static void
scanner_dealloc(PyObject *object)
{
    Scanner *s = (Scanner *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < s->arg_count; i++)
        free((void *)s->args[i].key.at);
    free((void *)s->instant.at);
    for (int i = 0; i < s->group_count; i++) {
        for (int j = 0; j < FIXED_COLUMNS + 2 * MAX_COLUMNS; j++)
            vec_free(&s->groups[i].columns[j]);
    }
    interner_free(&s->categories);
    interner_free(&s->names);
    interner_free(&s->texts);
    interner_free(&s->ids);
    vec_free(&s->category_of);
    vec_free(&s->header);
    for (int i = 0; i < SHOWN; i++) {
        vec_free(&s->shown[i].text);
        vec_free(&s->shown[i].rows);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static Module *
module_of(PyObject *self)
{
    return PyModule_GetState(PyType_GetModule(Py_TYPE(self)));
}

static bool
is_free(const Scanner *s)
{
    if (!s->busy && !s->finished)
        return true;
    PyErr_SetString(PyExc_RuntimeError, s->busy ? "another thread feeds this scanner"
                                                : "the scanner is finished");
    return false;
}

PyDoc_STRVAR(feed_doc,
             "feed(text, /)\n--\n\n"
             "Scan a piece and return how many of its bytes are done with: the rest goes in front\n"
             "of the next piece. Raises Refused where the text is not what is accepted; refused_at\n"
             "then says whether it can go on, with another event in place of one.");

static PyObject *
scanner_feed(PyObject *self, PyObject *text)
{
    Scanner *s = (Scanner *)self;
    Py_buffer view;
    if (!is_free(s) || PyObject_GetBuffer(text, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const uint8_t *start = view.buf;
    Cursor cursor = {start, start + view.len, NULL};
    Status status;
    s->busy = true;
    s->refused_at = -1;
    Py_BEGIN_ALLOW_THREADS
    status = view.len ? scan(s, &cursor) : MORE;
    Py_END_ALLOW_THREADS
    s->busy = false;
    size_t done = view.len ? (size_t)(cursor.at - start) : 0;
    PyBuffer_Release(&view);
    if (status == MORE) {
        s->consumed += done;
        return PyLong_FromSize_t(done);
    }
    s->finished = status != BAD || s->refused_at < 0;
    if (status == BAD)
        PyErr_Format(module_of(self)->refused, "byte %llu: %s",
                     (unsigned long long)(s->consumed + done), cursor.why);
    else
        PyErr_NoMemory();
    if (!s->finished)
        s->consumed += (uint64_t)s->refused_at;
    return NULL;
}

static PyObject *
shown_of(Shown *shown)
{
    PyObject *rows = PyList_New((Py_ssize_t)shown->rows.count);
    if (rows == NULL)
        return NULL;
    const int64_t *packed = (const int64_t *)(void *)shown->rows.data;
    for (size_t i = 0; i < shown->rows.count; i++) {
        int64_t row = packed[i] & ((INT64_C(1) << 56) - 1);
        PyObject *pair = Py_BuildValue("(iL)", (int)(packed[i] >> 56), (long long)row);
        if (pair == NULL) {
            Py_DECREF(rows);
            return NULL;
        }
        PyList_SetItem(rows, (Py_ssize_t)i, pair);
    }
    PyObject *found = Py_BuildValue("(y#N)", shown->text.data ? shown->text.data : "",
                                    (Py_ssize_t)shown->text.count, rows);
    shown->text.count = shown->rows.count = 0;
    return found;
}

PyDoc_STRVAR(take_doc,
             "take()\n--\n\n"
             "Events that are not made into columns, since the last call: three pairs (text, rows)\n"
             "for metadata, counters, and marked events. The text is the events between commas;\n"
             "rows are (group, row) of the marked ones.");

static PyObject *
scanner_take(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Scanner *s = (Scanner *)self;
    if (!is_free(s))
        return NULL;
    PyObject *found = PyTuple_New(SHOWN);
    for (int i = 0; found != NULL && i < SHOWN; i++) {
        PyObject *shown = shown_of(&s->shown[i]);
        if (shown == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SetItem(found, i, shown);
    }
    return found;
}

static PyObject *
texts_of(const Interner *in)
{
    PyObject *found = PyList_New((Py_ssize_t)in->texts.count);
    const Text *texts = (const Text *)(void *)in->texts.data;
    for (size_t i = 0; found != NULL && i < in->texts.count; i++) {
        PyObject *text = PyBytes_FromStringAndSize(in->bytes.data + texts[i].offset,
                                                   (Py_ssize_t)texts[i].length);
        if (text == NULL)
            Py_CLEAR(found);
        else
            PyList_SetItem(found, (Py_ssize_t)i, text);
    }
    return found;
}

static PyObject *
columns_of(const Module *module, Group *group)
{
    int count = FIXED_COLUMNS + group->int_count + group->text_count;
    PyObject *found = PyTuple_New(count);
    for (int i = 0; found != NULL && i < count; i++) {
        char format = i < FIXED_COLUMNS                      ? FIXED_TYPES[i]
                      : i < FIXED_COLUMNS + group->int_count ? 'q'
                                                             : 'i';
        PyObject *column = column_of(module, &group->columns[i], group->rows, format);
        if (column == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SetItem(found, i, column);
    }
    return found;
}

/* The columns of all groups, which start anew. */
static PyObject *
rows_of(const Module *module, Scanner *s)
{
    PyObject *groups = PyTuple_New(s->group_count);
    for (int i = 0; groups != NULL && i < s->group_count; i++) {
        PyObject *columns = columns_of(module, &s->groups[i]);
        if (columns == NULL)
            Py_CLEAR(groups);
        else
            PyTuple_SetItem(groups, i, columns);
        s->groups[i].rows = s->groups[i].capacity = 0;
    }
    return groups;
}

PyDoc_STRVAR(rows_doc,
             "rows()\n--\n\n"
             "The columns of each group with the rows since the last call.");

static PyObject *
scanner_rows(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Scanner *s = (Scanner *)self;
    return is_free(s) ? rows_of(module_of(self), s) : NULL;
}

PyDoc_STRVAR(finish_doc,
             "finish(is_part=False, /)\n--\n\n"
             "End and return (header, groups, names, texts, ids, categories, without_category).\n"
             "Raises Refused when the text is not whole, unless it is a part of one.");

static PyObject *
scanner_finish(PyObject *self, PyObject *args)
{
    Scanner *s = (Scanner *)self;
    Module *module = module_of(self);
    int is_part = 0;
    if (!PyArg_ParseTuple(args, "|p:finish", &is_part) || !is_free(s))
        return NULL;
    s->finished = true;
    if (!is_part && (s->state != AT_END || !s->has_events))
        return PyErr_Format(module->refused, "byte %llu: %s", (unsigned long long)s->consumed,
                            s->state == AT_END ? "no list of events" : "the text ends early");
    PyObject *groups = rows_of(module, s);
    if (groups == NULL)
        return NULL;
    PyObject *counts = column_of(module, &s->categories.counts, s->categories.texts.count, 'q');
    return Py_BuildValue("(y#NNNN(NN)L)", s->header.data ? s->header.data : "",
                         (Py_ssize_t)s->header.count, groups, texts_of(&s->names),
                         texts_of(&s->texts), texts_of(&s->ids), texts_of(&s->categories), counts,
                         (long long)s->without_category);
}

static PyMethodDef scanner_methods[] = {
    {"feed", scanner_feed, METH_O, feed_doc},
    {"take", scanner_take, METH_NOARGS, take_doc},
    {"rows", scanner_rows, METH_NOARGS, rows_doc},
    {"finish", scanner_finish, METH_VARARGS, finish_doc},
    {NULL, NULL, 0, NULL},
};

static PyObject *
scanner_state(PyObject *self, void *Py_UNUSED(closure))
{
    const Scanner *s = (const Scanner *)self;
    return PyLong_FromLong(s->state | (s->is_list ? IS_LIST : 0)
                           | (s->has_events ? HAS_EVENTS : 0));
}

static PyObject *
scanner_events_count(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(((const Scanner *)self)->event_count);
}

static PyObject *
scanner_refused_at(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(((const Scanner *)self)->refused_at);
}

static PyGetSetDef scanner_getset[] = {
    {"state", scanner_state, NULL, "Where it stands; a scanner made with it goes on from here.",
     NULL},
    {"events_count", scanner_events_count, NULL, "Events that it has read.", NULL},
    {"refused_at", scanner_refused_at, NULL,
     "Where the event begins in the last piece that was refused; -1 if it was no event.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(scanner_doc,
             "Scanner(args, groups, categories, marked, instant, instant_group, state=0)\n--\n\n"
             "See _scan.pyi.");

static PyType_Slot scanner_slots[] = {
    {Py_tp_doc, (void *)scanner_doc},
    {Py_tp_new, scanner_new},
    {Py_tp_dealloc, scanner_dealloc},
    {Py_tp_methods, scanner_methods},
    {Py_tp_getset, scanner_getset},
    {0, NULL},
};

static PyType_Spec scanner_spec = {
    .name = "chopper.collectors.formats.kineto._scan.Scanner",
    .basicsize = sizeof(Scanner),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = scanner_slots,
};

/* ------------------------------------------------------------------ the module */

static int
module_exec(PyObject *self)
{
    Module *module = PyModule_GetState(self);
    module->column_type = PyType_FromModuleAndSpec(self, &column_spec, NULL);
    if (module->column_type == NULL)
        return -1;
    PyObject *scanner = PyType_FromModuleAndSpec(self, &scanner_spec, NULL);
    if (scanner == NULL || PyModule_AddObjectRef(self, "Scanner", scanner) < 0) {
        Py_XDECREF(scanner);
        return -1;
    }
    Py_DECREF(scanner);
    module->refused = PyErr_NewExceptionWithDoc(
        "chopper.collectors.formats.kineto._scan.Refused",
        "The text is not what the scanner accepts: where, and why.", PyExc_ValueError, NULL);
    if (module->refused == NULL || PyModule_AddObjectRef(self, "Refused", module->refused) < 0
        || PyModule_AddObjectRef(self, "Column", module->column_type) < 0)
        return -1;
    return 0;
}

static int
module_traverse(PyObject *self, visitproc visit, void *arg)
{
    Module *module = PyModule_GetState(self);
    Py_VISIT(module->column_type);
    Py_VISIT(module->refused);
    return 0;
}

static int
module_clear(PyObject *self)
{
    Module *module = PyModule_GetState(self);
    Py_CLEAR(module->column_type);
    Py_CLEAR(module->refused);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_scan",
    .m_doc = "Scanner of trace events in JSON.",
    .m_size = sizeof(Module),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__scan(void)
{
    return PyModuleDef_Init(&module_def);
}
