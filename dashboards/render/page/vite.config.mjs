// Builds the page; its preview hands the queries on to Prometheus.
export default {
  esbuild: { jsx: 'automatic' },
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}' },
  build: { chunkSizeWarningLimit: 10000 },
  preview: { proxy: { '/api': process.env.PROMETHEUS ?? 'http://127.0.0.1:9090' } },
};
