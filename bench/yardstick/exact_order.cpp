// The exact minimum-peak ordering search in its first form, kept as the yardstick that the engine is timed against.
// Build: g++ -O2 -std=c++17 exact_order.cpp -o exact_order      Run: ./exact_order X.txt, the text made by `bench.yardstick.text_of`
// [seconds=30] [commits=11] [valley=1] [print] Input: "N inplace", then per node: is_input bytes may_write_in_place n_inputs inputs...
// (node i creates tensor i) Footprint of a step: live bytes + output bytes, less the output's where it may take over its first equal-sized
// input that dies there. Inputs are live from the start until their last use, graph outputs to the end. sz bytes, ins/cons edges, ew
// in-place flag, z Zobrist keys; mem live bytes, h hash of the executed downset, ready the ready set; ex/un execute and undo; chain,
// valley, closure the safe commits; dfs the search under bound B; nextB the least violated footprint.
#include <bits/stdc++.h>
using namespace std;
typedef long long ll;
typedef unsigned long long u64;
typedef pair<u64, u64> H;
struct HH {
  size_t operator()(const H& h) const { return h.first ^ (h.second * 0x9e3779b97f4a7c15ull); }
};
int N;
bool inpl;
vector<char> isin, ew, upd;
vector<ll> sz;
vector<vector<int>> ins, cons;
vector<H> z;
vector<int> leftc, ind;
vector<char> done;
ll mem;
H h;
int nd = 0, tot = 0;
vector<int> order;
set<int> ready;
ll stepOf(int v) {
  ll s = mem + sz[v];
  if (inpl && ew[v])
    for (int t : ins[v])
      if (sz[t] == sz[v]) {
        if (leftc[t] == 1) s -= sz[v];
        break;
      }
  return s;
}
ll aft(int v) {
  ll m = mem + sz[v];
  for (int t : ins[v])
    if (leftc[t] == 1) m -= sz[t];
  return m;
}
void ex(int v) {
  mem = aft(v);
  for (int t : ins[v]) leftc[t]--;
  done[v] = 1;
  nd++;
  order.push_back(v);
  h.first ^= z[v].first;
  h.second ^= z[v].second;
  ready.erase(v);
  for (int c : cons[v])
    if (--ind[c] == 0) ready.insert(c);
}
void un(int v) {
  for (int c : cons[v])
    if (ind[c]++ == 0) ready.erase(c);
  ready.insert(v);
  h.first ^= z[v].first;
  h.second ^= z[v].second;
  order.pop_back();
  nd--;
  done[v] = 0;
  for (int t : ins[v]) leftc[t]++;
  mem -= sz[v];
  for (int t : ins[v])
    if (leftc[t] == 1) mem += sz[t];
}
bool OPT_CL = true, OPT_CH = true;
ll nextB;
u64 nodes = 0, limit;
unordered_set<H, HH> fail;
double tend;
bool timeout_ = false;
double now() { return chrono::duration<double>(chrono::steady_clock::now().time_since_epoch()).count(); }
bool chain(int v, ll B) {  // try a totally ordered chain from v that returns to <= start
  ll m0 = mem;
  int k = 0;
  int cur = v;
  bool ok = false;
  while (true) {
    if (stepOf(cur) > B) {
      nextB = min(nextB, stepOf(cur));
      break;
    }
    int before = ready.size();
    ex(cur);
    k++;
    if (mem <= m0) {
      ok = true;
      break;
    }
    // newly ready ops: those consumers of cur with ind==0
    int nx = -1, cnt = 0;
    for (int c : cons[cur])
      if (ind[c] == 0) {
        nx = c;
        cnt++;
      }
    (void)before;
    if (cnt != 1 || k > 400) break;
    cur = nx;
  }
  if (ok) return true;
  while (k--) un(order.back());
  return false;
}

struct Din {
  struct E {
    int to;
    ll c;
  };
  vector<E> e;
  vector<vector<int>> g;
  vector<int> lv, it;
  Din(int n) : g(n), lv(n), it(n) {}
  void add(int a, int b, ll c) {
    g[a].push_back(e.size());
    e.push_back({b, c});
    g[b].push_back(e.size());
    e.push_back({a, 0});
  }
  bool bfs(int s, int t) {
    fill(lv.begin(), lv.end(), -1);
    lv[s] = 0;
    vector<int> q{s};
    for (size_t i = 0; i < q.size(); i++)
      for (int k : g[q[i]])
        if (e[k].c > 0 && lv[e[k].to] < 0) {
          lv[e[k].to] = lv[q[i]] + 1;
          q.push_back(e[k].to);
        }
    return lv[t] >= 0;
  }
  ll df(int u, int t, ll f) {
    if (u == t) return f;
    for (int& i = it[u]; i < (int)g[u].size(); i++) {
      int k = g[u][i];
      if (e[k].c > 0 && lv[e[k].to] == lv[u] + 1) {
        ll d = df(e[k].to, t, min(f, e[k].c));
        if (d) {
          e[k].c -= d;
          e[k ^ 1].c += d;
          return d;
        }
      }
    }
    return 0;
  }
  ll run(int s, int t) {
    ll r = 0;
    while (bfs(s, t)) {
      fill(it.begin(), it.end(), 0);
      while (ll d = df(s, t, LLONG_MAX)) r += d;
    }
    return r;
  }
};
bool OPT_V = true;
int VL = 400;
long vcommit = 0, vtry = 0;
bool valley(ll B, int first) {  // greedy rollout to first valley <= start, shrink it to the min-f sub-downset (min cut), commit it
  ll m0 = mem;
  vtry++;
  vector<int> S;
  bool ok = false;
  set<int> loc;
  set<int> r0(ready.begin(), ready.end());
  int nxt = first;
  while ((int)S.size() < VL) {
    if (nxt < 0) {
      tuple<ll, ll, int> b{LLONG_MAX, 0, -1};
      for (int v : ready)
        if (first < 0 || !r0.count(v)) {
          ll st = stepOf(v);
          if (st <= B) b = min(b, {aft(v), st, v});
        }
      nxt = get<2>(b);
      if (nxt < 0) break;
    } else if (stepOf(nxt) > B)
      break;
    ex(nxt);
    S.push_back(nxt);
    nxt = -1;
    if (mem <= m0) {
      ok = true;
      break;
    }
  }
  ll fS = mem;
  for (int i = (int)S.size() - 1; i >= 0; i--) un(S[i]);
  if (!ok) return false;
  map<int, int> id;
  for (int v : S) {
    int k = id.size();
    id[v] = k;
  }
  int n = S.size();
  set<int> T;
  for (int v : S) {
    T.insert(v);
    for (int t : ins[v]) T.insert(t);
  }
  Din d(n + T.size() + 2);
  int s = n + T.size(), t = s + 1, k = n;
  ll tot_ = 0;
  const ll INF = LLONG_MAX / 4;
  for (int v : S) {
    if (sz[v]) d.add(id[v], t, sz[v]);
    for (int p : ins[v])
      if (id.count(p)) d.add(id[v], id[p], INF);
  }
  for (int x : T) {
    bool all = !cons[x].empty();
    for (int c : cons[x])
      if (!done[c] && !id.count(c)) {
        all = false;
        break;
      }
    if (all && sz[x]) {
      d.add(s, k, sz[x]);
      tot_ += sz[x];
      for (int c : cons[x])
        if (id.count(c)) d.add(k, id[c], INF);
      if (id.count(x)) d.add(k, id[x], INF);
    }
    k++;
  }
  ll best = tot_ - d.run(s, t);
  vector<int> pick;
  if (best <= m0 - fS) {
    pick = S;
  } else {
    d.bfs(s, t);
    for (int v : S)
      if (d.lv[id[v]] >= 0) pick.push_back(v);
  }
  int c = 0;
  for (int v : pick) {
    if (stepOf(v) > B) {
      while (c--) un(order.back());
      return false;
    }
    ex(v);
    c++;
  }
  if (mem > m0) {
    while (c--) un(order.back());
    return false;
  }
  vcommit++;
  return c > 0;
}
void closure(ll B) {
  if (!OPT_CL) return;
  bool ch = true;
  while (ch) {
    ch = false;
    for (int v : ready) {
      if (stepOf(v) <= B && aft(v) <= mem) {
        ex(v);
        ch = true;
        break;
      }
    }
    if (!ch && OPT_CH) {
      vector<int> r(ready.begin(), ready.end());
      for (int v : r)
        if (chain(v, B)) {
          ch = true;
          break;
        }
      if (!ch && OPT_V && !ready.empty()) {
        if (valley(B, -1))
          ch = true;
        else {
          for (int v : r)
            if (valley(B, v)) {
              ch = true;
              break;
            }
        }
      }
    }
  }
}
bool dfs(ll B) {
  if (nd == tot) return true;
  int o0 = order.size();
  closure(B);
  if (nd == tot) return true;
  if (fail.count(h)) {
    while ((int)order.size() > o0) un(order.back());
    return false;
  }
  if ((++nodes & 255) == 0 && now() > tend) {
    timeout_ = true;
  }
  if (nodes > limit) timeout_ = true;
  if (timeout_) {
    while ((int)order.size() > o0) un(order.back());
    return false;
  }
  H hk = h;
  vector<tuple<ll, ll, int>> c;
  for (int v : ready) {
    ll s = stepOf(v);
    if (s <= B)
      c.push_back({aft(v), s, v});
    else
      nextB = min(nextB, s);
  }
  sort(c.begin(), c.end());
  for (auto& [a, s, v] : c) {
    ex(v);
    if (dfs(B)) return true;
    un(v);
    if (timeout_) break;
  }
  if (!timeout_) fail.insert(hk);
  while ((int)order.size() > o0) un(order.back());
  return false;
}
void reset() {
  for (int v = 0; v < N; v++) {
    leftc[v] = cons[v].size();
    ind[v] = 0;
    done[v] = 0;
  }
  for (int v = 0; v < N; v++)
    if (!isin[v])
      for (int t : ins[v])
        if (!isin[t]) ind[v]++;
  mem = 0;
  ready.clear();
  order.clear();
  nd = 0;
  h = {0, 0};
  for (int v = 0; v < N; v++) {
    if (isin[v])
      mem += sz[v];
    else if (!ind[v])
      ready.insert(v);
  }
}
ll greedy() {
  reset();
  ll pk = mem;
  while (nd < tot) {
    tuple<ll, ll, int> b{LLONG_MAX, 0, 0};
    for (int v : ready) b = min(b, {aft(v), stepOf(v), v});
    int v = get<2>(b);
    pk = max(pk, stepOf(v));
    ex(v);
  }
  return pk;
}
int main(int c, char** a) {
  ifstream f(a[1]);
  double tl = c > 2 ? atof(a[2]) : 30;
  if (c > 4) OPT_V = a[4][0] == "1"[0];
  if (c > 3) {
    OPT_CL = a[3][0] == '1';
    OPT_CH = a[3][1] == '1';
  }
  int ip;
  f >> N >> ip;
  inpl = ip;
  isin.resize(N);
  ew.resize(N);
  sz.resize(N);
  ins.resize(N);
  cons.resize(N);
  leftc.resize(N);
  ind.resize(N);
  done.resize(N);
  z.resize(N);
  mt19937_64 r(1);
  for (int v = 0; v < N; v++) {
    int i, e, k;
    f >> i >> sz[v] >> e >> k;
    isin[v] = i;
    ew[v] = e;
    ins[v].resize(k);
    for (int& t : ins[v]) {
      f >> t;
      cons[t].push_back(v);
    }
    z[v] = {r(), r()};
    if (!i) tot++;
  }
  double t0 = now();
  ll g = greedy();
  ll lb = 0;
  reset();
  lb = mem;
  for (int v = 0; v < N; v++)
    if (!isin[v]) {
      ll s = sz[v];
      bool cr = false;
      for (int t : ins[v]) {
        s += sz[t];
        if (inpl && ew[v] && !cr && sz[t] == sz[v]) {
          s -= sz[v];
          cr = true;
        }
      }
      lb = max(lb, s);
    }
  ll B = lb, ub = g;
  bool opt = false;
  limit = ~0ull;
  int it = 0;
  tend = t0 + tl * 0.75;
  while (B < g) {
    reset();
    fail.clear();
    nextB = LLONG_MAX;
    timeout_ = false;
    bool ok = dfs(B);
    it++;
    if (ok) {
      opt = true;
      ub = B;
      break;
    }
    if (timeout_) break;
    B = nextB;
    lb = B;
  }
  if (B >= g) {
    opt = true;
    lb = ub = g;
  }
  double t1 = now() - t0;
  if (!opt) {  // binary-ish search for UB with node limits
    tend = t0 + tl;
    ll lo = lb, hi = ub;
    for (int k = 0; k < 20 && now() < tend && hi > lo; k++) {
      ll m = (lo + hi) / 2;
      reset();
      fail.clear();
      nextB = LLONG_MAX;
      timeout_ = false;
      limit = nodes + 400000;
      bool ok = dfs(m);
      if (ok) {
        ll pk = 0;
        vector<int> o = order;
        reset();
        pk = mem;
        for (int v : o) {
          pk = max(pk, stepOf(v));
          ex(v);
        }
        hi = pk;
        ub = min(ub, pk);
      } else
        lo = m + 1;
    }
  }
  printf("%s n=%d greedy=%.1f LB=%.1f UB=%.1f KB %s iters=%d nodes=%llu time=%.3f total=%.3f\n", a[1], tot, g / 1024., lb / 1024.,
         ub / 1024., opt ? "OPT" : "open", it, nodes, t1, now() - t0);
  if (c > 5 && opt && B < g) {
    for (int v : order) printf("%d ", v);
    puts("");
  }
}
