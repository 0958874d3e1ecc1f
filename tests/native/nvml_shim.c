/* A libnvidia-ml.so.1 that plays a script: what the collectors are tested against without a device.
 *
 * The script is the file that $NVML_SHIM_SCRIPT names, one statement a line:
 *   gpu INDEX UUID NAME                 a device, in order
 *   set INDEX KEY VALUE [FROM_MS]       the value of a key from a time on (a step function)
 *   ripple INDEX KEY PERIOD_MS          a sensor that is renewed: it alternates by 1 at that period
 *   fail INDEX WHAT CODE [FROM_MS [TO_MS]]   an error of a function, of "field:ID", or of "*"
 *   block INDEX WHAT MS [FROM_MS [TO_MS]]    a function, or "*", takes MS longer
 *   sample INDEX TYPE VALUE AT_MS       an entry of the buffer that nvmlDeviceGetSamples shows
 *   mig INDEX UUID                      a MIG device that is a part of that device
 *   init CODE                           nvmlInit fails with CODE
 * Times count from nvmlInit, from $NVML_SHIM_START_MS (CLOCK_MONOTONIC) where it is set, or from the
 * clock that shim_set_time_ms() sets (in-process tests).
 * Keys: capability (as 90 for 9.0) sm mem (MHz) power (mW) reasons (bits) energy (mJ) temperature, mig, max_sm, application,
 * field:ID (raw value), field:ID:all (the same with scope 0xFFFFFFFF), field:ID:type (what its type is
 * said to be), gpm:ID (double), threshold:ID (of temperature).
 *
 * Clocks that are listed: clock_min, clock_max (MHz); power_limit, power_min, power_max (mW).
 *
 * Layouts follow nvml.h. What is not scripted is "not supported", as on a real device. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_GPUS 64
#define MAX_LINES 8192
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, NO_DATA = 21 };

typedef struct { int next; uint64_t key; double value; int64_t from_ms, ripple_ms; } setting;
typedef struct { int gpu; char what[64]; int code; int64_t from_ms, to_ms, block_ms; } failure;
typedef struct { int gpu; unsigned type, value; int64_t at_ms; } buffered;
typedef struct { char uuid[80], name[96]; } gpu;

static gpu gpus[MAX_GPUS];
static char parts[MAX_GPUS][80];
static int gpu_count;
static setting settings[MAX_LINES];
enum { SLOTS = 64 };
static int setting_count, first_setting[MAX_GPUS][SLOTS];
static buffered samples[MAX_LINES];
static int sample_count;
static failure failures[MAX_LINES];
static int failure_count;
static int init_code;
static int64_t started_ms, fixed_ms = -1;
static int64_t offset_us; /* of the wall clock over the script's */
static int calls;

static int64_t monotonic_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int64_t at_ms(void) { return fixed_ms >= 0 ? fixed_ms : monotonic_ms() - started_ms; }

void shim_set_time_ms(int64_t ms) { fixed_ms = ms; }
int shim_calls(void) { return calls; }

/* A key as a number, so that a lookup costs little beside what is measured: the text's hash; of a field
 * its id with what follows it. */
enum { PLAIN = 1, ALL_LINKS, TYPE };
static uint64_t of_field(unsigned id, unsigned what) { return (uint64_t)id << 2 | what; }
static uint64_t of_metric(unsigned id) { return of_field(id, 0); }
static uint64_t of_name(const char *name) {
    uint64_t hash = 14695981039346656037u;
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    return hash | UINT64_C(1) << 63;
}
static uint64_t of_key(const char *key) {
    unsigned id;
    char rest[8] = "";
    if (sscanf(key, "gpm:%u", &id) == 1) return of_metric(id);
    if (sscanf(key, "field:%u:%7s", &id, rest) < 1) return of_name(key);
    return of_field(id, !strcmp(rest, "all") ? ALL_LINKS : !strcmp(rest, "type") ? TYPE : PLAIN);
}
static int slot_of(uint64_t key) { return (int)((key ^ key >> 32) % SLOTS); }

static void load(void) {
    gpu_count = setting_count = failure_count = sample_count = init_code = 0;
    memset(first_setting, -1, sizeof first_setting);
    const char *path = getenv("NVML_SHIM_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) { init_code = DRIVER_NOT_LOADED; return; }
    char line[512];
    while (fgets(line, sizeof line, file)) {
        int index, code;
        char what[64];
        double value;
        long long from = 0, to = INT64_MAX;
        gpu g;
        if (sscanf(line, "gpu %d %79s %95[^\n]", &index, g.uuid, g.name) == 3) {
            if (index >= 0 && index < MAX_GPUS) { gpus[index] = g; if (index >= gpu_count) gpu_count = index + 1; }
        } else if (sscanf(line, "set %d %47s %lf %lld", &index, what, &value, &from) >= 3) {
            if (setting_count < MAX_LINES && index >= 0 && index < MAX_GPUS) {
                uint64_t key = of_key(what);
                int *first = &first_setting[index][slot_of(key)];
                settings[setting_count] = (setting){*first, key, value, from, 0};
                *first = setting_count++;
            }
        } else if (sscanf(line, "ripple %d %47s %lld", &index, what, &from) == 3) {
            uint64_t key = of_key(what);
            if (index >= 0 && index < MAX_GPUS)
                for (int i = first_setting[index][slot_of(key)]; i >= 0; i = settings[i].next)
                    if (settings[i].key == key) settings[i].ripple_ms = from;
        } else if (sscanf(line, "fail %d %63s %d %lld %lld", &index, what, &code, &from, &to) >= 3) {
            failure f = {index, "", code, from, to, 0};
            strncpy(f.what, what, sizeof f.what - 1);
            if (failure_count < MAX_LINES) failures[failure_count++] = f;
        } else if (sscanf(line, "block %d %63s %lf %lld %lld", &index, what, &value, &from, &to) >= 3) {
            failure f = {index, "", 0, from, to, (int64_t)value};
            strncpy(f.what, what, sizeof f.what - 1);
            if (failure_count < MAX_LINES) failures[failure_count++] = f;
        } else if (sscanf(line, "sample %d %d %lf %lld", &index, &code, &value, &from) == 4) {
            buffered b = {index, (unsigned)code, (unsigned)value, from};
            if (sample_count < MAX_LINES) samples[sample_count++] = b;
        } else if (sscanf(line, "mig %d %79s", &index, g.uuid) == 2) {
            if (index >= 0 && index < MAX_GPUS) strcpy(parts[index], g.uuid);
        } else if (sscanf(line, "init %d", &code) == 1) {
            init_code = code;
        }
    }
    fclose(file);
}

/* Handles are pointers into the table of devices, as opaque as the real ones. */
static int index_of(void *handle) {
    gpu *g = handle;
    return g >= gpus && g < gpus + gpu_count ? (int)(g - gpus) : -1;
}

static int failed(int index, const char *what) {
    if (!failure_count) return SUCCESS;
    int64_t now = at_ms();
    for (int i = 0; i < failure_count; i++) {
        failure *f = &failures[i];
        if (f->gpu == index && now >= f->from_ms && now < f->to_ms &&
            (!strcmp(f->what, what) || !strcmp(f->what, "*"))) {
            if (!f->block_ms) return f->code;
            struct timespec wait = {f->block_ms / 1000, f->block_ms % 1000 * 1000000};
            nanosleep(&wait, NULL);
        }
    }
    return SUCCESS;
}

static int failed_number(int index, const char *kind, unsigned id) {
    if (!failure_count) return SUCCESS;
    char what[48];
    snprintf(what, sizeof what, "%s:%u", kind, id);
    return failed(index, what);
}

/* The latest setting of a key that is in force; 0 when there is none. */
static int lookup_at(int64_t now, int index, uint64_t key, double *value) {
    int64_t best = -1;
    /* The last line of the script comes first. */
    for (int i = first_setting[index][slot_of(key)]; i >= 0; i = settings[i].next) {
        setting *s = &settings[i];
        if (s->key == key && now >= s->from_ms && s->from_ms > best) {
            best = s->from_ms;
            *value = s->value + (s->ripple_ms ? now / s->ripple_ms % 2 : 0);
        }
    }
    return best >= 0;
}
static int lookup(int index, uint64_t key, double *value) { return lookup_at(at_ms(), index, key, value); }

/* What is too large stands for all bits one. */
static unsigned long long whole(double value) {
    return value >= 18446744073709551615.0 ? UINT64_MAX : (unsigned long long)value;
}

static int get(void *handle, const char *function, const char *key, double *value) {
    calls++;
    int index = index_of(handle);
    if (index < 0) return INVALID_ARGUMENT;
    int code = failed(index, function);
    if (code) return code;
    return lookup(index, of_name(key), value) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    load();
    const char *start = getenv("NVML_SHIM_START_MS");
    if (!started_ms) started_ms = start ? atoll(start) : monotonic_ms();
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    offset_us = now.tv_sec * 1000000LL + now.tv_nsec / 1000 - (monotonic_ms() - started_ms) * 1000;
    return init_code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "scripted error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.00.shim"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = gpu_count; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    if ((int)index >= gpu_count) return INVALID_ARGUMENT;
    int code = failed(index, "nvmlDeviceGetHandleByIndex_v2");
    *out = &gpus[index];
    return code;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    for (int i = 0; i < gpu_count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) { *out = &gpus[i]; return SUCCESS; }
        if (parts[i][0] && !strcmp(parts[i], uuid)) { *out = parts[i]; return SUCCESS; }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *part, void **out) {
    for (int i = 0; i < gpu_count; i++)
        if (part == parts[i]) { *out = &gpus[i]; return SUCCESS; }
    return INVALID_ARGUMENT;
}
static int text(void *handle, const char *function, const char *value, char *out, unsigned size) {
    int index = index_of(handle);
    if (index < 0) return INVALID_ARGUMENT;
    int code = failed(index, function);
    if (!code) snprintf(out, size, "%s", value);
    return code;
}
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) { return text(h, "nvmlDeviceGetUUID", ((gpu *)h)->uuid, out, size); }
int nvmlDeviceGetName(void *h, char *out, unsigned size) { return text(h, "nvmlDeviceGetName", ((gpu *)h)->name, out, size); }

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_info;
int nvmlDeviceGetPciInfo_v3(void *h, pci_info *out) {
    int index = index_of(h);
    if (index < 0) return INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    snprintf(out->busId, sizeof out->busId, "00000000:%02X:00.0", 16 + index);
    out->bus = 16 + index;
    return failed(index, "nvmlDeviceGetPciInfo_v3");
}
int nvmlDeviceGetMigMode(void *h, unsigned *current, unsigned *pending) {
    double value;
    int code = get(h, "nvmlDeviceGetMigMode", "mig", &value);
    if (!code) *current = *pending = (unsigned)value;
    return code;
}

static const char *const CLOCK_KEYS[] = {"graphics", "sm", "mem", "video"};
static int number(void *h, const char *function, const char *key, unsigned *out) {
    double value;
    int code = get(h, function, key, &value);
    if (!code) *out = (unsigned)value;
    return code;
}
int nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *out) {
    return type > 3 ? INVALID_ARGUMENT : number(h, "nvmlDeviceGetClockInfo", CLOCK_KEYS[type], out);
}
int nvmlDeviceGetMaxClockInfo(void *h, unsigned type, unsigned *out) {
    return number(h, "nvmlDeviceGetMaxClockInfo", type == 1 ? "max_sm" : "max_mem", out);
}
int nvmlDeviceGetMaxCustomerBoostClock(void *h, unsigned type, unsigned *out) {
    (void)type;
    return number(h, "nvmlDeviceGetMaxCustomerBoostClock", "max_boost", out);
}
int nvmlDeviceGetClock(void *h, unsigned type, unsigned id, unsigned *out) {
    (void)type; (void)id;
    return number(h, "nvmlDeviceGetClock", "application", out);
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
    unsigned value;
    int code = number(h, "nvmlDeviceGetCudaComputeCapability", "capability", &value);
    if (!code) { *major = value / 10; *minor = value % 10; }
    return code;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *out) { return number(h, "nvmlDeviceGetPowerUsage", "power", out); }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *out) { return number(h, "nvmlDeviceGetEnforcedPowerLimit", "limit", out); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *out) { return number(h, "nvmlDeviceGetCurrPcieLinkGeneration", "pcie_gen", out); }
int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *out) { return number(h, "nvmlDeviceGetCurrPcieLinkWidth", "pcie_width", out); }
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *out) {
    double value;
    int code = get(h, "nvmlDeviceGetCurrentClocksEventReasons", "reasons", &value);
    if (!code) *out = whole(value);
    return code;
}
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *out) {
    return sensor ? INVALID_ARGUMENT : number(h, "nvmlDeviceGetTemperature", "temperature", out);
}
int nvmlDeviceGetTemperatureThreshold(void *h, unsigned which, unsigned *out) {
    char key[32];
    snprintf(key, sizeof key, "threshold:%u", which);
    return number(h, "nvmlDeviceGetTemperatureThreshold", key, out);
}
typedef struct { unsigned version; int sensor; int temperature; } temperature_v1;
int nvmlDeviceGetTemperatureV(void *h, temperature_v1 *out) {
    double value;
    int code = get(h, "nvmlDeviceGetTemperatureV", "temperature", &value);
    if (!code) out->temperature = (int)value;
    return code;
}
typedef struct { unsigned gpu, memory; } utilization;
int nvmlDeviceGetUtilizationRates(void *h, utilization *out) {
    double value;
    int code = get(h, "nvmlDeviceGetUtilizationRates", "utilization", &value);
    if (code) return code;
    out->gpu = (unsigned)value;
    out->memory = lookup(index_of(h), of_name("memory_utilization"), &value) ? (unsigned)value : 0;
    return SUCCESS;
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2 *out) {
    double total, used;
    if (out->version != (sizeof(memory_v2) | 2u << 24)) return 25;
    int code = get(h, "nvmlDeviceGetMemoryInfo_v2", "memory_used", &used);
    if (code) return code;
    out->total = lookup(index_of(h), of_name("memory_total"), &total) ? (unsigned long long)total : 0;
    out->used = used >= 18446744073709551615.0 ? UINT64_MAX : (unsigned long long)used;
    out->reserved = 0;
    out->free = out->total - out->used;
    return SUCCESS;
}

/* What is set goes to the file that $NVML_SHIM_LOG names, a line each. */
static int logged(void *h, const char *function, unsigned a, unsigned b) {
    int index = index_of(h);
    if (index < 0) return INVALID_ARGUMENT;
    int code = failed(index, function);
    const char *path = getenv("NVML_SHIM_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%d %s %u %u = %d\n", index, function, a, b, code); fclose(file); }
    return code;
}
int nvmlDeviceSetGpuLockedClocks(void *h, unsigned least, unsigned most) { return logged(h, "nvmlDeviceSetGpuLockedClocks", least, most); }
int nvmlDeviceResetGpuLockedClocks(void *h) { return logged(h, "nvmlDeviceResetGpuLockedClocks", 0, 0); }
int nvmlDeviceSetPowerManagementLimit(void *h, unsigned mw) { return logged(h, "nvmlDeviceSetPowerManagementLimit", mw, 0); }
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *out) { return number(h, "nvmlDeviceGetPowerManagementLimit", "power_limit", out); }
int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *least, unsigned *most) {
    int code = number(h, "nvmlDeviceGetPowerManagementLimitConstraints", "power_min", least);
    return code ? code : number(h, "nvmlDeviceGetPowerManagementLimitConstraints", "power_max", most);
}
static int listed(const unsigned *values, unsigned found, unsigned *count, unsigned *out) {
    int room = out && *count >= found;
    if (room) memcpy(out, values, found * sizeof *values);
    *count = found;
    return room ? SUCCESS : 7; /* insufficient size */
}
int nvmlDeviceGetSupportedMemoryClocks(void *h, unsigned *count, unsigned *out) {
    unsigned mhz;
    int code = number(h, "nvmlDeviceGetSupportedMemoryClocks", "mem", &mhz);
    return code ? code : listed(&mhz, 1, count, out);
}
/* From clock_max down to clock_min in steps of 15 MHz, as H100 lists them. */
int nvmlDeviceGetSupportedGraphicsClocks(void *h, unsigned memory, unsigned *count, unsigned *out) {
    unsigned least, most, values[512], found = 0;
    (void)memory;
    int code = number(h, "nvmlDeviceGetSupportedGraphicsClocks", "clock_max", &most);
    if (!code) code = number(h, "nvmlDeviceGetSupportedGraphicsClocks", "clock_min", &least);
    for (; !code && most >= least && found < 512; most -= 15) values[found++] = most;
    return code ? code : listed(values, found, count, out);
}

typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value_t;
typedef struct {
    unsigned fieldId, scopeId;
    int64_t timestamp, latencyUsec;
    unsigned valueType;
    int nvmlReturn;
    value_t value;
} field_value;
int nvmlDeviceGetFieldValues(void *h, int count, field_value *values) {
    calls++;
    int index = index_of(h);
    if (index < 0) return INVALID_ARGUMENT;
    int code = failed(index, "nvmlDeviceGetFieldValues");
    if (code) return code;
    int64_t now = at_ms();
    for (int i = 0; i < count; i++) {
        field_value *v = &values[i];
        double value;
        v->timestamp = now * 1000;
        v->nvmlReturn = failed_number(index, "field", v->fieldId);
        if (v->nvmlReturn) continue;
        uint64_t key = of_field(v->fieldId, v->scopeId == 0xFFFFFFFFu ? ALL_LINKS : PLAIN);
        if (!lookup_at(now, index, key, &value)) { v->nvmlReturn = NOT_SUPPORTED; continue; }
        /* Power in mW comes as unsigned int, everything else as unsigned long long. */
        if (v->fieldId >= 185 && v->fieldId <= 192) { v->valueType = 1; v->value.ui = (unsigned)value; }
        else { v->valueType = 3; v->value.ull = whole(value); }
        if (lookup_at(now, index, of_field(v->fieldId, TYPE), &value)) v->valueType = (unsigned)value;
    }
    return SUCCESS;
}

typedef struct { unsigned version, supported; } gpm_support;
typedef struct { int gpu; int64_t ms; } gpm_sample;
typedef struct { const char *shortName, *longName, *unit; } metric_info;
typedef struct { unsigned metricId; int nvmlReturn; double value; metric_info info; } gpm_metric;
typedef struct { unsigned version, count; gpm_sample *first, *second; gpm_metric metrics[]; } gpm_request;
int nvmlGpmQueryDeviceSupport(void *h, gpm_support *out) {
    double value;
    int code = get(h, "nvmlGpmQueryDeviceSupport", "gpm", &value);
    out->supported = code ? 0 : (unsigned)value;
    return code == NOT_SUPPORTED ? SUCCESS : code;
}
int nvmlGpmSampleAlloc(gpm_sample **out) { *out = calloc(1, sizeof **out); return *out ? SUCCESS : 20; }
int nvmlGpmSampleFree(gpm_sample *sample) { free(sample); return SUCCESS; }
int nvmlGpmSampleGet(void *h, gpm_sample *sample) {
    int index = index_of(h), code = index < 0 ? INVALID_ARGUMENT : failed(index, "nvmlGpmSampleGet");
    sample->gpu = index;
    sample->ms = at_ms();
    return code;
}
int nvmlGpmMetricsGet(gpm_request *request) {
    if (request->version != 1) return 25;
    int code = failed(request->second->gpu, "nvmlGpmMetricsGet");
    if (code) return code;
    /* The hardware's counters are read at most every 100 ms. */
    if (request->second->ms - request->first->ms < 100) return NO_DATA;
    int64_t now = at_ms();
    for (unsigned i = 0; i < request->count; i++) {
        gpm_metric *m = &request->metrics[i];
        int gpu = request->second->gpu;
        m->nvmlReturn = failed_number(gpu, "gpm", m->metricId);
        if (!m->nvmlReturn && !lookup_at(now, gpu, of_metric(m->metricId), &m->value)) m->nvmlReturn = NOT_SUPPORTED;
    }
    return SUCCESS;
}

typedef struct { unsigned long long timeStamp; value_t value; } buffered_sample;
int nvmlDeviceGetSamples(void *h, unsigned type, unsigned long long seen_us, unsigned *value_type,
                         unsigned *count, buffered_sample *out) {
    int index = index_of(h);
    if (index < 0) return INVALID_ARGUMENT;
    int code = failed(index, "nvmlDeviceGetSamples");
    if (code) return code;
    unsigned found = 0, room = out ? *count : 0;
    int any = 0;
    for (int i = 0; i < sample_count; i++) {
        buffered *b = &samples[i];
        unsigned long long at_us = offset_us + b->at_ms * 1000;
        if (b->gpu != index || b->type != type) continue;
        any = 1;
        if (b->at_ms > at_ms() || at_us <= seen_us) continue;
        if (out && found < room) { out[found].timeStamp = at_us; out[found].value.ui = b->value; }
        found++;
    }
    *value_type = 1;
    *count = out && found > room ? room : found;
    return !any ? NOT_SUPPORTED : found ? SUCCESS : NO_DATA;
}
