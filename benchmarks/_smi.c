/* What nvidia-smi --query-gpu=… --format=csv does: a process that loads the library, asks each device
 * and prints text; once, or with an argument again and again with a sleep of so many ms between. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) return 1;
    int (*init)(unsigned) = dlsym(library, "nvmlInitWithFlags");
    int (*count)(unsigned *) = dlsym(library, "nvmlDeviceGetCount_v2");
    int (*handle)(unsigned, void **) = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    int (*clock)(void *, unsigned, unsigned *) = dlsym(library, "nvmlDeviceGetClockInfo");
    int (*power)(void *, unsigned *) = dlsym(library, "nvmlDeviceGetPowerUsage");
    int (*reasons)(void *, unsigned long long *) = dlsym(library, "nvmlDeviceGetCurrentClocksEventReasons");
    unsigned devices = 0;
    if (init(0) || count(&devices)) return 1;
    int wait_ms = argc > 1 ? atoi(argv[1]) : 0;
    do {
        for (unsigned i = 0; i < devices; i++) {
            void *device;
            unsigned sm = 0, memory = 0, milliwatt = 0;
            unsigned long long bits = 0;
            handle(i, &device);
            clock(device, 1, &sm);
            clock(device, 2, &memory);
            power(device, &milliwatt);
            reasons(device, &bits);
            struct timespec now;
            clock_gettime(CLOCK_REALTIME, &now);
            printf("%lld.%09ld, %u, %u MHz, %u MHz, %.2f W, 0x%016llx\n", (long long)now.tv_sec,
                   now.tv_nsec, i, sm, memory, milliwatt / 1e3, bits);
        }
        fflush(stdout);
        struct timespec rest = {wait_ms / 1000, wait_ms % 1000 * 1000000};
        if (wait_ms) nanosleep(&rest, NULL);
    } while (wait_ms);
    return 0;
}
