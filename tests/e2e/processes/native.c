/* The counter without an interpreter: native FOLDER MIB. Small images, so that runs are fast. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[2][4200];

static void put(const char *folder, const char *name, const char *word, uint64_t count)
{
	FILE *file;

	snprintf(path[0], sizeof(path[0]), "%s/%s.new", folder, name);
	snprintf(path[1], sizeof(path[1]), "%s/%s", folder, name);
	file = fopen(path[0], "w");
	if (!file)
		exit(3);
	fprintf(file, "%s%llu", word, (unsigned long long)count);
	fclose(file);
	rename(path[0], path[1]);
}

static int there(const char *folder, const char *name)
{
	snprintf(path[0], sizeof(path[0]), "%s/%s", folder, name);
	return access(path[0], F_OK) == 0;
}

static uint64_t next(uint64_t x)
{
	x ^= x << 13;
	x ^= x >> 7;
	return x ^ x << 17;
}

int main(int argc, char **argv)
{
	size_t words, i;
	uint64_t count = 0, seed, x, *memory;
	char text[32];
	int counter;

	if (argc != 3)
		return 2;
	words = (size_t)atoi(argv[2]) << 17;
	memory = malloc(words * sizeof(*memory) + 1);
	seed = (uint64_t)getpid() * 0x9e3779b97f4a7c15ULL;
	for (i = 0, x = seed; i < words; i++)
		memory[i] = x = next(x);
	put(argv[1], "pid", "", (uint64_t)getpid());
	/* Always open, always of one size: a checkpoint of any moment can be restored more than once. */
	snprintf(path[0], sizeof(path[0]), "%s/count", argv[1]);
	counter = open(path[0], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	for (;;) {
		snprintf(text, sizeof(text), "%020llu", (unsigned long long)++count);
		if (pwrite(counter, text, 20, 0) != 20)
			return 3;
		if (there(argv[1], "check")) {
			unlink(path[0]);
			for (i = 0, x = seed; i < words; i++)
				if (memory[i] != (x = next(x)))
					break;
			put(argv[1], "checked", i == words ? "good " : "bad ", count);
		}
		if (there(argv[1], "exit")) {
			FILE *file = fopen(path[0], "r");
			int status = 0;

			if (!file || fscanf(file, "%d", &status) != 1)
				return 3;
			return status;
		}
		usleep(20000);
	}
}
