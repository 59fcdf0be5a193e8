/* Times MPI_Allreduce of f32 vectors, in place; one JSON line for each size.
 *
 *     mpicc -O2 peers/mpi_all_reduce.c -o mpi_all_reduce
 *     mpirun -n 2 ./mpi_all_reduce SECONDS BYTES...
 *
 * The method and the fields are those of `trireme bench collectives`: each call starts after a barrier and lasts until the
 * slowest rank returns, and the median counts.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARMUP = 5, ITERS_MIN = 5, ITERS_MAX = 200 };

static int ascending(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void all_reduce(float *vector, int count) {
    MPI_Allreduce(MPI_IN_PLACE, vector, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* The median of some calls, each of which takes as long as on the slowest rank. */
static double median_seconds(float *vector, int count, int iters) {
    double seconds[ITERS_MAX];
    for (int i = 0; i < iters; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double began = MPI_Wtime();
        all_reduce(vector, count);
        seconds[i] = MPI_Wtime() - began;
    }
    MPI_Allreduce(MPI_IN_PLACE, seconds, iters, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(seconds, iters, sizeof *seconds, ascending);
    return seconds[iters / 2];
}

static void measure(double seconds, size_t bytes, int rank, int world_size) {
    const int count = (int)(bytes / sizeof(float));
    float *vector = malloc((size_t)count * sizeof *vector);
    if (vector == NULL) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
        return;
    }
    for (int i = 0; i < count; i++) {
        vector[i] = (float)(rank + 1);
    }
    all_reduce(vector, count);
    for (int i = 0; i < count; i++) {
        if (vector[i] != (float)(world_size * (world_size + 1) / 2)) {
            fprintf(stderr, "all_reduce of %zu bytes gave a wrong result\n", bytes);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        vector[i] = 0.0F; /* keeps repeated sums finite */
    }
    const double trial = median_seconds(vector, count, WARMUP);
    const double wanted = seconds / trial;
    const int iters = wanted < ITERS_MIN ? ITERS_MIN : wanted > ITERS_MAX ? ITERS_MAX : (int)wanted;
    const double median = median_seconds(vector, count, iters);
    if (rank == 0) {
        printf("{\"peer\": \"mpi\", \"op\": \"all_reduce\", \"bytes\": %zu, \"world_size\": %d, \"iters\": %d, "
               "\"median_us\": %.3f}\n",
               bytes, world_size, iters, median * 1e6);
    }
    free(vector);
}

int main(int argc, char **argv) {
    int rank, world_size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    for (int i = 2; i < argc; i++) {
        measure(atof(argv[1]), strtoull(argv[i], NULL, 10), rank, world_size);
    }
    MPI_Finalize();
    return 0;
}
